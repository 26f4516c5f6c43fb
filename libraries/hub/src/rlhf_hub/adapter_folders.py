"""Folders in PEFT's format: an adapter, and the name of its base model. Only settings are read here."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf.errors import ModelError

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
BASE_HASH = "base_weights"
"""Metadata field of :data:`ADAPTER_WEIGHTS`: the hash of the base's weights, if a run wrote it."""
_TOKENIZER = ("tokenizer_config.json", "tokenizer.json")


@dataclass(frozen=True, slots=True)
class AdapterFolder:
    """An adapter without its base."""

    folder: Path
    config: dict[str, Any]
    """Content of :data:`ADAPTER_CONFIG`."""

    @property
    def base(self) -> str:
        """The folder or hub name (``owner/name@revision``) of its base. Raises ModelError if no base is named."""
        name, revision = self.config.get("base_model_name_or_path"), self.config.get("revision")
        if not isinstance(name, str) or not name:
            raise ModelError(
                f"the {ADAPTER_CONFIG} of {self.folder} names no base (base_model_name_or_path = {name!r}). Set it to "
                f"the base's folder or hub name, or merge them: rlhf merge {self.folder} NEW_FOLDER --base BASE"
            )
        return f"{name}@{revision}" if revision and not Path(name).expanduser().exists() else name

    @property
    def has_config(self) -> bool:
        """Whether the folder has the ``config.json`` of the whole model, which runs write. PEFT writes none."""
        return (self.folder / "config.json").is_file()

    @property
    def has_tokenizer(self) -> bool:
        return any((self.folder / name).is_file() for name in _TOKENIZER)


def adapter_of(path: str) -> AdapterFolder | None:
    """The adapter in a local folder. None if there is none, or if the folder also has the weights of a whole model.

    Raises ModelError if the adapter's settings cannot be read.
    """
    folder = Path(path).expanduser()
    file = folder / ADAPTER_CONFIG
    if not file.is_file() or any(folder.glob("model*.safetensors*")):
        return None
    return AdapterFolder(folder, read_adapter_config(file))


def read_adapter_config(file: Path) -> dict[str, Any]:
    """The content of an :data:`ADAPTER_CONFIG`. Raises ModelError if it cannot be read."""
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as cause:
        raise ModelError(f"{file} cannot be read: {cause}. Copy the adapter again.") from cause
    if not isinstance(config, dict):
        raise ModelError(f"{file} does not contain a JSON object. Copy the adapter again.")
    return config


def require_base(adapter: AdapterFolder) -> None:
    """Raises ModelError if the base of an adapter looks like a folder but is none, or is itself an adapter."""
    base = adapter.base
    place = Path(base).expanduser()
    name = base.partition("@")[0]  # a revision may contain more slashes: refs/pr/1
    looks_local = place.is_absolute() or base.startswith((".", "~")) or name.count("/") > 1
    if looks_local and not place.is_dir():
        raise ModelError(
            f"{adapter.folder} is an adapter of {base}, but this folder does not exist. Copy the base there, or merge "
            f"the adapter into a copy of its base: rlhf merge {adapter.folder} NEW_FOLDER --base BASE"
        )
    if not (adapter.folder / ADAPTER_WEIGHTS).is_file():
        raise ModelError(f"the adapter {adapter.folder} lacks {ADAPTER_WEIGHTS}. Copy it again.")
    if place.is_dir() and adapter_of(base) is not None:
        raise ModelError(
            f"the base of the adapter {adapter.folder} is itself an adapter: {base}. Merge that adapter first (rlhf "
            "merge), and use the new folder as the base."
        )
