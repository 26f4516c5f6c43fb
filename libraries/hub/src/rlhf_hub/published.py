"""A published model: the folder with its files, and its ``config.json``.

transformers and the hub's client are imported only when a model is read.
"""

from __future__ import annotations

import hashlib
import json
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlhf.errors import ModelError, did_you_mean

from rlhf_hub.adapter_folders import ADAPTER_CONFIG, adapter_of, require_base
from rlhf_hub.hub import Commits, HubError, download, files_of, hub_name
from rlhf_hub.other_formats import refuse_other_formats, refuse_other_weights_on_hub

SETTINGS = ("*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken")
"""Patterns of the config and tokenizer files in a repository on a hub."""
SETTINGS_BYTES, TEMPLATE_BYTES = 2**28, 2**20
"""Largest files of :data:`SETTINGS`, which are read whole, and of chat templates among them."""
INDEX = "model.safetensors.index.json"
_FILES_OF_A_MODEL = ("config.json", ADAPTER_CONFIG, "tokenizer.json", "tokenizer_config.json")
"""A model's folder has at least one of these files, also if other files of it are missing."""
BLOCK, BLOCKS = 2**12, 64
"""Bytes of a block, and number of blocks of a weights file, that :func:`content_of` reads."""


def looks_local(path: str) -> bool:
    """Whether a model's path is a folder, or looks like one. Otherwise it is a name on a hub."""
    return Path(path).expanduser().exists() or hub_name(path) is None


def require_folder(path: str) -> None:
    """Raises ModelError if the folder does not exist, with a list of the folders beside it, if it only holds folders of
    models, or if its weights are in another format."""
    folder = Path(path).expanduser()
    refuse_other_formats(path)
    if not folder.exists():
        siblings = _folders(folder.parent)
        note = f" In {folder.parent} there are: {', '.join(siblings[:20])}." if siblings else ""
        raise ModelError(f"the model folder {path} does not exist.{note}{did_you_mean(folder.name, siblings)}")
    _refuse_folder_of_models(folder)
    if (adapter := adapter_of(path)) is not None:
        require_base(adapter)


def pinned(model: str, commits: Commits) -> str:
    """A model's path. A hub name becomes ``owner/name@commit``, which is the same for every process.

    Args:
        commits: the commits of the run.

    Raises ModelError if the hub does not know the model or is out of reach, or if the path is a file or a folder with
    weights in another format.
    """
    repo = hub_name(model)
    if repo is None:
        refuse_other_formats(model)
        if (adapter := adapter_of(model)) is not None:
            require_base(adapter)
    try:
        return model if repo is None else f"{repo.name}@{commits.commit('model', repo)}"
    except HubError as error:
        raise ModelError(_not_published(model, error)) from error


def model_folder(path: str, weights: bool = False, code: bool = False) -> str:
    """The folder with a model's files: the folder itself, or the folder of the hub's files in the client's cache. Each
    call looks up the commit of a branch or tag again, so a run passes a :func:`pinned` path. For an adapter: the folder
    of its base if ``weights`` is set, or if the adapter has no ``config.json``.

    Args:
        weights: also the weights, which must be safetensors.
        code: also Python files (``trust_remote_code``).

    Raises ModelError if the hub does not provide the files, or there are only weights of another kind.
    """
    repo = hub_name(path)
    if repo is None:
        folder = Path(path).expanduser()
        require_files(folder)
        _refuse_folder_of_models(folder)
        if (adapter := adapter_of(path)) is not None and (weights or not adapter.has_config):
            require_base(adapter)
            return model_folder(adapter.base, weights, code)
        if weights or folder.is_file():
            refuse_other_formats(path)
        return str(folder)
    try:
        commit = Commits().commit("model", repo)
        patterns = [*SETTINGS, *(["*.py"] if code else [])]
        folder = download("model", repo, commit, patterns)
        if weights:
            # The index came with the settings. It names the files of weights that are divided.
            index = folder / INDEX
            names = ["model.safetensors"]
            if index.is_file():
                names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
            else:
                refuse_other_weights_on_hub(path, files_of("model", repo, commit))
            folder = download("model", repo, commit, [*patterns, *names])
            if absent := [name for name in names if not (folder / name).is_file()]:
                raise ModelError(
                    f"the model {path} has no {absent[0]}: neither the cache ({folder}) nor the hub provides it. If a "
                    "download was interrupted, repeat it while the hub can be reached."
                )
    except HubError as error:
        raise ModelError(_not_published(path, error)) from error
    return str(folder)


def tokenizer_folder(path: str, code: bool = False) -> str:
    """The folder with the tokenizer of a model: :func:`model_folder`, except that an adapter may have its own
    tokenizer."""
    adapter = adapter_of(path) if hub_name(path) is None else None
    return str(adapter.folder) if adapter is not None and adapter.has_tokenizer else model_folder(path, code=code)


def require_files(folder: Path) -> None:
    """Raises ModelError if a file that is read with a model is not a regular file (reading a link to a device might
    never end), or is too large for its name. Follows links. A folder that does not exist has no files."""
    for pattern in (*SETTINGS, "*.safetensors", "additional_chat_templates/*.jinja"):
        for path in folder.glob(pattern):
            try:
                facts = path.stat()
            except FileNotFoundError:  # a dangling link counts as no file
                continue
            except OSError as cause:
                raise ModelError(f"{path} cannot be read: {cause.strerror}. Copy the model again.") from cause
            if stat.S_ISDIR(facts.st_mode):
                continue
            if not stat.S_ISREG(facts.st_mode):
                raise ModelError(f"{path} is neither a file nor a link to one. Copy the model again.")
            largest = TEMPLATE_BYTES if path.suffix == ".jinja" else SETTINGS_BYTES
            if pattern != "*.safetensors" and facts.st_size > largest:
                raise ModelError(
                    f"{path} has {facts.st_size:,} bytes, but a settings file of a model may have at most {largest:,}. "
                    "Remove it, or copy the model again."
                )


def weights_of(folder: Path) -> str:
    """Same as :func:`content_of`, for the weights only: the tokenizer of a base may change, but its weights may not."""
    return _content(folder, ("*.safetensors",))


def content_of(folder: Path) -> str:
    """SHA-256 of the files that a run reads from a model's folder: config, tokenizer and weights. Of a generation
    config only the end tokens count; the other values go into exports.

    Of a weights file, the size and 64 blocks of 4 KiB count, spread evenly over the file, because reading a large model
    takes minutes. Training changes almost all of the weights that it trains, so different weights differ in some block.
    """
    return _content(folder, (*SETTINGS, "*.safetensors"))


def _content(folder: Path, patterns: Sequence[str]) -> str:
    digest = hashlib.sha256()
    for path in sorted({path for pattern in patterns for path in folder.glob(pattern) if path.is_file()}):
        if path.name == "generation_config.json":
            digest.update(_end_tokens(path))
            continue
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            if path.suffix != ".safetensors":
                digest.update(file.read())
                continue
            for start in range(0, size, max(BLOCK, size // BLOCKS)):
                file.seek(start)
                digest.update(file.read(BLOCK))
    return digest.hexdigest()


def _end_tokens(generation_config: Path) -> bytes:
    """The end tokens of a generation config; empty if it has none. For a file that is not JSON, its whole content."""
    content = generation_config.read_bytes()
    try:
        ends = json.loads(content).get("eos_token_id")
    except (ValueError, AttributeError):
        return content
    return b"" if ends is None else f"eos_token_id {ends if isinstance(ends, list) else [ends]}\n".encode()


def settings_of(model: str, asker: str) -> dict[str, Any]:
    """The ``config.json`` of a folder or a hub name.

    Args:
        asker: the component that needs it, for messages, such as ``reward 'model'``.

    Raises ModelError if it is missing or cannot be read.
    """
    from transformers import PretrainedConfig

    try:
        settings, _ = PretrainedConfig.get_config_dict(model_folder(model))
    except Exception as cause:  # of many kinds: no such folder or name, no network, no JSON
        raise ModelError(f"{asker}: the config.json of {model!r} cannot be read: {cause}") from cause
    if not settings:
        raise ModelError(f"{asker}: {model!r} has no config.json. Use the folder or hub name of a model")
    require_names(settings.get("architectures"), model)
    return dict(settings)


def add_older_names(folder: Path) -> None:
    """Add fields with the names of transformers 4 to the configs in a folder. Without them, transformers 4 and engines
    based on it silently compute with another base of rotary embeddings, and refuse the tokenizer. Transformers 5 reads
    the same as before. Rotary embeddings that differ between layers have no older names."""
    file = folder / "config.json"
    config: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    for part in filter(None, (config, config.get("text_config"))):
        rope = dict(part.get("rope_parameters") or {})
        if (base := rope.pop("rope_theta", None)) is None:
            continue
        part["rope_theta"] = base
        if (share := rope.pop("partial_rotary_factor", None)) is not None:
            part["partial_rotary_factor"] = share
        if rope not in ({}, {"rope_type": "default"}):
            part["rope_scaling"] = rope
        file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    file = folder / "tokenizer_config.json"
    config = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    if config.get("tokenizer_class") == "TokenizersBackend":
        config["tokenizer_class"] = "PreTrainedTokenizerFast"
        file.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def require_names(architectures: object, model: str) -> None:
    """Raises ModelError if ``architectures`` of a ``config.json`` is present but not a list of names."""
    if architectures is not None and not (
        isinstance(architectures, list) and all(isinstance(name, str) for name in architectures)
    ):
        raise ModelError(
            f"the config.json of {model!r}: architectures is {architectures!r}, but must be a list of class names, "
            'such as ["Qwen3ForCausalLM"]'
        )


def _refuse_folder_of_models(folder: Path) -> None:
    """Raises ModelError if a folder, such as that of a run, has no file of a model but folders with models."""
    if any((folder / name).is_file() for name in _FILES_OF_A_MODEL):
        return
    names = [n for n in _folders(folder) if any((folder / n / name).is_file() for name in _FILES_OF_A_MODEL)]
    if names:
        raise ModelError(f"{folder} is not a model, but holds models: {', '.join(str(folder / n) for n in names[:20])}")


def _not_published(name: str, error: HubError) -> str:
    """The error for a name that is neither a folder nor known to the hub."""
    place = Path(name).parent
    suggestion = did_you_mean(Path(name).name, _folders(place))
    return f"there is no folder {name} here, so it is taken as a hub name; {error}{suggestion}"


def _folders(place: Path) -> list[str]:
    return sorted(p.name for p in place.iterdir() if p.is_dir()) if place.is_dir() else []
