"""The manifest of a checkpoint folder: every file with its size and SHA-256, and the SHA-256 of the manifest itself.

The manifest is written last, so a folder without one is not complete. :mod:`rlhf_runtime.checkpoint.store` decides
where checkpoints are stored and which are kept.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import Field
from rlhf.errors import CheckpointError
from rlhf.saved import Counter, Saved, validated

from rlhf_runtime.checkpoint import atomic_files as files
from rlhf_runtime.checkpoint import json_values

SCHEMA = 1
"""Version of the layout of a checkpoint. A reader refuses other versions."""
MANIFEST = "manifest.json"


class SavedFile(Saved):
    size: Counter
    sha256: str


class SavedManifest(Saved):
    """The content of the manifest, written by :func:`seal`."""

    schema_: int = Field(alias="schema")
    step: Counter
    meta: dict[str, Any]
    best: dict[str, Any] | None
    files: dict[str, SavedFile]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """One complete checkpoint."""

    step: int
    path: Path
    meta: Mapping[str, Any]
    """The run's description when it saved; see :func:`rlhf_runtime.checkpoint.compare`."""
    contents: Mapping[str, Mapping[str, Any]] = field(repr=False)
    """{path inside the folder: {"size": bytes, "sha256": hex}}."""
    best: Mapping[str, Any] | None = None
    """{"metric", "value"} if this was the best checkpoint when it was saved."""

    def damage(self) -> str:
        """The difference from the manifest, after reading every byte; empty if there is none."""
        names = list(self.contents)
        with ThreadPoolExecutor(_threads(names)) as pool:
            digests = pool.map(_sha256, [self.path / name for name in names])
            for name, digest in zip(names, digests, strict=True):
                if digest != self.contents[name]["sha256"]:
                    return f"{name} has SHA-256 {digest[:12]}..., saved was {self.contents[name]['sha256'][:12]}..."
        return ""


def read_checkpoint(path: Path) -> Checkpoint | str:
    """The checkpoint in ``path``, or a text that says why it is incomplete."""
    if not path.is_dir():
        return "it is not a folder" if os.path.lexists(path) else "there is no such folder"
    if not (path / MANIFEST).is_file():
        return f"{MANIFEST} is missing"
    try:
        manifest = json_values.read_json(path / MANIFEST)
    except CheckpointError as error:
        return str(error)
    layout = manifest.get("schema") if isinstance(manifest, dict) else None
    if type(layout) is int and layout > SCHEMA:  # whose own checks this release does not know
        older = f"this release reads version {SCHEMA}"
        return f"its layout is version {layout}, {older}. Continue with the release that saved it"
    if not isinstance(manifest, dict) or manifest.pop("sha256", None) != _digest(manifest):
        return f"{MANIFEST} is damaged"
    if layout != SCHEMA:
        return f"its layout is version {layout}, this release reads version {SCHEMA}"
    try:
        saved = validated(SavedManifest, manifest, MANIFEST)
    except CheckpointError as error:
        return str(error)
    if path.name != f"step-{saved.step:06d}" and not path.name.startswith(files.TEMPORARY):
        return f"{MANIFEST} is of step {saved.step}, not of the folder's"
    for name, entry in manifest["files"].items():
        try:
            size = (path / name).stat().st_size
        except FileNotFoundError:
            return f"{name} is missing"
        except OSError as cause:
            return f"{name} cannot be read: {cause.strerror}"
        if size != entry["size"]:
            return f"{name} has {size} bytes, saved were {entry['size']}"
    return Checkpoint(manifest["step"], path, manifest["meta"], manifest["files"], manifest["best"])


def seal(folder: Path, step: int, meta: Mapping[str, Any], best: Mapping[str, Any] | None) -> None:
    """Write the manifest of all files in ``folder`` and force all files to the disk."""
    paths = sorted(p for p in folder.rglob("*") if p.is_file())
    with ThreadPoolExecutor(_threads(paths)) as pool:
        digests = list(pool.map(_sha256_synced, paths))
    manifest = {
        "schema": SCHEMA,
        "step": step,
        "meta": json_values.encode(dict(meta), "meta"),
        "best": json_values.encode(dict(best), "best") if best is not None else None,
        "files": {
            p.relative_to(folder).as_posix(): {"size": p.stat().st_size, "sha256": d}
            for p, d in zip(paths, digests, strict=True)
        },
    }
    json_values.write_json(folder / MANIFEST, {**manifest, "sha256": _digest(manifest)})
    files.sync_folders(folder)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sha256_synced(path: Path) -> str:
    with path.open("rb") as file:
        os.fsync(file.fileno())
        return hashlib.file_digest(file, "sha256").hexdigest()


def _digest(manifest: Mapping[str, Any]) -> str:
    return hashlib.sha256(json_values.dumps(dict(manifest)).encode()).hexdigest()


def _threads(items: list[Any]) -> int:
    """Number of threads that hash files. Hashing releases the interpreter lock, so shards are hashed in parallel."""
    return max(1, min(8, len(items), os.cpu_count() or 1))
