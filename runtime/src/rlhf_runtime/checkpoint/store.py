"""The checkpoints of one run: ``checkpoints/step-000123``, each with a manifest of checksums.

A checkpoint is written to a temporary folder and renamed when every byte is on disk, so a folder named ``step-*`` is
complete even if the process dies at any moment. Old checkpoints are deleted after the new one is in place. There is no
pickle: the caller chooses the format (safetensors, JSON), and the manifest is JSON.

The manifest lists every file with its size and SHA-256, and contains a SHA-256 of itself. It is written last, so a
folder without a manifest is not complete.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import Field
from rlhf.control_groups import usable_cores
from rlhf.errors import CheckpointError, RlhfError
from rlhf.paths import disk_is_full
from rlhf.saved import Counter, Saved, SavedPart, validated

from rlhf_runtime.checkpoint import atomic_files as files
from rlhf_runtime.checkpoint import json_values

BEST = "best.json"
ANEW = "start the run from the beginning with --overwrite, which deletes the saved one"
STATE_BYTES = 12
"""Bytes of a trained parameter in a checkpoint: its weight and two moments of the optimizer, in fp32."""
_STEP = re.compile(r"step-(\d{6,})")


class SavedBest(SavedPart):
    """``best.json``. Further fields describe the metric."""

    step: Counter


class CheckpointStore:
    """Saves, finds and rotates the checkpoints below ``run_dir``.

    Args:
        keep: number of newest checkpoints that are kept, in addition to the best one.
        note: called with a line of text for everything that is skipped or repaired.
        require_own: called before anything is saved. Raises an error if the folder belongs to another run.

    Only the process that holds the run directory's lock may save or clean.
    """

    def __init__(
        self,
        run_dir: Path | str,
        keep: int = 3,
        note: Callable[[str], None] = lambda text: None,
        require_own: Callable[[], None] = lambda: None,
    ) -> None:
        self.root = Path(run_dir) / "checkpoints"
        self.keep = keep
        self._note, self._require_own = note, require_own

    # --------------------------------------------------------------------------------------- saving

    def check_space(self, parameters: int, copies: int) -> None:
        """Called before the first step. Raises CheckpointError if the disk has no space for one checkpoint, and adds a
        note if it probably cannot hold all.

        Args:
            parameters: number of trained parameters, of all roles.
            copies: number of checkpoints that the run has at a time.
        """
        # The checkpoints of a resumed run take their space already.
        disk, copies = self._disk(), max(1, copies - len(self.complete()))
        if not disk.total:  # a mounted object store that reports no sizes
            return
        weights, states = 4 * parameters, STATE_BYTES * parameters
        text = f"{self.root} is on a disk with {disk.free / 2**30:.1f} GiB of free space"
        if disk.free < weights:
            raise CheckpointError(
                f"{text}, and a checkpoint takes at least {weights / 2**30:.1f} GiB ({parameters:,} trained parameters "
                "in fp32). Free some space, or choose another run.output."
            )
        if disk.free < copies * states:
            self._note(
                f"{text}, and the run needs about {copies * states / 2**30:.1f} GiB: {copies} checkpoints with the "
                f"weights and two moments of {parameters:,} trained parameters in fp32. Free some space, lower "
                f"checkpoint.keep (now {self.keep}), or choose another run.output."
            )

    def save(
        self, step: int, write: Callable[[Path], None], meta: Mapping[str, Any], best: Mapping[str, Any] | None = None
    ) -> Path:
        """Make checkpoint ``step`` from the files that ``write(folder)`` puts into an empty folder.

        Args:
            meta: JSON values that identify the run; see :func:`rlhf_runtime.checkpoint.compare.describe`.
            best: {"metric", "value"} if this is the best checkpoint so far, which is not deleted by rotation.

        Returns the finished folder. Raises CheckpointError if it cannot be written (disk full); older checkpoints are
        then unchanged and no incomplete files remain.
        """
        target = self._folder(step)
        with self.writing(target, f"checkpoint {target}"):
            if isinstance(read_checkpoint(target), Checkpoint):
                raise CheckpointError(f"{target} already holds a complete checkpoint; a step is saved once.")

            def write_sealed(folder: Path) -> None:
                write(folder)
                seal(folder, step, meta, best)

            files.publish_folder(target, write_sealed)
            # The manifest has the mark, too. If this process dies here, clean() restores the pointer from it.
            if best is not None:
                self._point(step, best)
            self._rotate()
        return target

    def mark_best(self, step: int, **best: Any) -> None:
        """Protect the saved checkpoint ``step`` from rotation, instead of the previous best checkpoint. ``best``: the
        metric and its value, for ``best.json``. If ``best`` is passed to :meth:`save` instead, both happen in one
        atomic step."""
        self._find(step)
        self._point(step, best)

    def clean(self) -> None:
        """Called at the start of a run. Deletes the files of a killed save, repairs the pointer to the best checkpoint,
        and deletes old checkpoints that the killed save left. Raises CheckpointError if that fails (disk full)."""
        with self.writing(self.root):
            for name in files.remove_leftovers(self.root):
                self._note(f"removed {self.root / name}, left by a process that was killed while saving")
            complete = self.complete()
            pointer = self.pointer()
            folder = self._folder(pointer["step"]) if pointer else self.root
            marked = [c for c in complete if c.best is not None]
            pointed = pointer["step"] if pointer and any(c.step == pointer["step"] for c in complete) else -1
            if marked and marked[-1].step > pointed:  # killed between the rename and the pointer, or its folder is gone
                assert marked[-1].best is not None
                self._point(marked[-1].step, marked[-1].best)
            elif pointer and os.path.lexists(folder) and pointed < 0:
                self._note(
                    f"the best checkpoint, {folder}, cannot be used and is left as it is: {read_checkpoint(folder)}"
                )
            elif pointer and pointed < 0:
                (self.root / BEST).unlink()
                self._note(f"the best checkpoint, step {pointer['step']}, no longer exists")
            self._rotate()

    # -------------------------------------------------------------------------------------- finding

    def complete(self) -> list[Checkpoint]:
        """All complete checkpoints by step. Presence and sizes are checked, checksums are not."""
        checkpoints = [read_checkpoint(path) for _, path in self._folders()]
        return [c for c in checkpoints if isinstance(c, Checkpoint)]

    def newest(self) -> Checkpoint | None:
        """The newest checkpoint; None if there is none. Presence and sizes are checked, checksums are not.

        Raises CheckpointError if it cannot be read. An older checkpoint is not used in its place. A checkpoint gets its
        name only when it is complete, so it was not damaged by a killed run: something else damaged it, or a newer
        release saved it.
        """
        unusable: list[str] = []
        for step, path in reversed(self._folders()):
            checkpoint = read_checkpoint(path)
            if isinstance(checkpoint, str):
                unusable.append(f"{path}: {checkpoint}")
            elif not unusable:
                return checkpoint
            else:
                raise _unusable(unusable, f"delete what cannot be used to continue from step {step}")
        if unusable:
            raise _unusable(unusable, ANEW)
        return None

    def best(self) -> Checkpoint | None:
        """The checkpoint that was marked best, if any."""
        pointer = self.pointer()
        return self._find(int(pointer["step"])) if pointer else None

    def pointer(self) -> dict[str, Any] | None:
        """The content of ``best.json``; None if there is none. Raises CheckpointError if it is damaged."""
        path = self.root / BEST
        if not path.is_file():
            return None
        way_out = "Restore it from a copy, or delete it: a resume creates it again from the checkpoints"
        pointer: dict[str, Any] = json_values.read_json(path, way_out)
        validated(SavedBest, pointer, path)
        return pointer

    def open(self, step: int) -> Checkpoint:
        """Checkpoint ``step``, after comparing every file with its checksum. Raises CheckpointError that says what is
        wrong."""
        checkpoint = self._find(step)
        damage = checkpoint.damage()
        if damage:
            older = [c.step for c in self.complete() if c.step < step]
            way_out = f"delete the folder to continue from step {older[-1]}" if older else ANEW
            raise CheckpointError(
                f"checkpoint {checkpoint.path} is damaged: {damage}. Restore the file from a copy, or {way_out}. "
                "Nothing was changed."
            )
        return checkpoint

    # ------------------------------------------------------------------------------------- internal

    def _folders(self) -> list[tuple[int, Path]]:
        """All folders with the name of a checkpoint, by step.

        Raises CheckpointError if :attr:`root` cannot be listed, such as a link to a disk that is not there.
        """
        if not os.path.lexists(self.root):
            return []
        try:
            paths = list(self.root.iterdir())
        except OSError as cause:
            raise CheckpointError(
                f"the checkpoints in {self.root} cannot be listed: {cause.strerror}. Restore the folder, or the disk "
                "that it is on. Nothing was changed."
            ) from cause
        return sorted((int(m[1]), p) for p in paths if (m := _STEP.fullmatch(p.name)))

    def _folder(self, step: int) -> Path:
        return self.root / f"step-{step:06d}"

    def _find(self, step: int) -> Checkpoint:
        checkpoint = read_checkpoint(self._folder(step))
        if isinstance(checkpoint, str):
            steps = [c.step for c in self.complete()]
            raise CheckpointError(
                f"checkpoint of step {step} in {self.root} cannot be used: {checkpoint}. The complete checkpoints are "
                f"those of steps {steps}."
            )
        return checkpoint

    def _point(self, step: int, best: Mapping[str, Any]) -> None:
        json_values.write_json(self.root / BEST, {"step": step, **best})

    def _rotate(self) -> None:
        pointer = self.pointer()
        for old in self.complete()[: -self.keep]:
            if pointer is None or old.step != pointer["step"]:
                files.delete_old(old.path, self._note)

    @contextmanager
    def writing(self, path: Path, label: str = "") -> Iterator[None]:
        """Context for writing ``path``, whose folder is created. Converts an error into one that says what remains of
        the run and how to continue. Libraries raise disk errors as their own classes.

        Args:
            label: name of ``path`` in the error; default: the path.
        """
        self._require_own()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            yield
        except Exception as cause:
            full = disk_is_full(cause)
            # Such an error says what to do, except that of a rank whose disk is full.
            if isinstance(cause, RlhfError) and not full:
                raise
            text = f"{label or path} could not be saved: {type(cause).__name__}: {cause}."
            if full:
                text += (
                    f" The disk is full ({self._disk().free / 2**20:.0f} MiB free): free some space, lower "
                    f"checkpoint.keep (now {self.keep}), set checkpoint.save_rollouts = false (the samples of every "
                    "step) or choose another run.output."
                )
            remains = "There is no checkpoint yet: start the run again."
            if steps := [c.step for c in self.complete()]:
                remains = f"The checkpoints of steps {steps} are intact; continue with --resume."
            raise CheckpointError(f"{text} {remains}") from cause

    def _disk(self) -> Any:
        """Size and free space, in bytes, of the disk that the checkpoints are on."""
        return shutil.disk_usage(self.root if self.root.is_dir() else self.root.parent)


def _unusable(checkpoints: Sequence[str], way_out: str) -> CheckpointError:
    """The error if the newest checkpoints cannot be read. ``checkpoints``: for each, its path and the reason."""
    label = "the newest checkpoint" if len(checkpoints) == 1 else f"the newest {len(checkpoints)} checkpoints"
    return CheckpointError(
        "\n  ".join(
            [f"{label} cannot be used. Nothing was changed.", *checkpoints, f"Restore from a copy, or {way_out}."]
        )
    )


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
    """The run's description when it saved; see :func:`rlhf_runtime.checkpoint.compare.compare`."""
    contents: Mapping[str, Mapping[str, Any]] = field(repr=False)
    """{path inside the folder: {"size": bytes, "sha256": hex}}."""
    best: Mapping[str, Any] | None = None
    """{"metric", "value"} if this was the best checkpoint when it was saved."""

    def damage(self) -> str:
        """The first difference from the manifest, after reading every byte; empty if there is none."""
        names = list(self.contents)
        with ThreadPoolExecutor(_threads(names)) as pool:
            return next(filter(None, pool.map(self._damage_of, names)), "")

    def _damage_of(self, name: str) -> str:
        expected = self.contents[name]["sha256"]
        try:
            digest = _sha256(self.path / name)
        except OSError as cause:
            return f"{name} cannot be read: {cause.strerror}"
        return "" if digest == expected else f"{name} has SHA-256 {digest[:12]}..., expected {expected[:12]}..."


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
    if type(layout) is int and layout > SCHEMA:  # this release does not know the checks of that layout
        older = f"this release reads version {SCHEMA}"
        return f"its layout is version {layout}, but {older}. Continue with the release that saved it"
    if not isinstance(manifest, dict) or manifest.pop("sha256", None) != _digest(manifest):
        return f"{MANIFEST} is damaged"
    if layout != SCHEMA:
        return f"its layout is version {layout}, but this release reads version {SCHEMA}"
    try:
        saved = validated(SavedManifest, manifest, MANIFEST)
    except CheckpointError as error:
        return str(error)
    if path.name != f"step-{saved.step:06d}":
        return f"{MANIFEST} is of step {saved.step}, not of the step in the folder's name"
    for name, entry in manifest["files"].items():
        try:
            size = (path / name).stat().st_size
        except FileNotFoundError:
            return f"{name} is missing"
        except OSError as cause:
            return f"{name} cannot be read: {cause.strerror}"
        if size != entry["size"]:
            return f"{name} has {size} bytes, expected {entry['size']}"
    return Checkpoint(manifest["step"], path, manifest["meta"], manifest["files"], manifest["best"])


def seal(folder: Path, step: int, meta: Mapping[str, Any], best: Mapping[str, Any] | None) -> None:
    """Write the manifest of all files in ``folder`` and force them to the disk."""
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
    return max(1, min(8, len(items), usable_cores()))
