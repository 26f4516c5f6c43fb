"""The run directory: one run, one folder, one process at a time.

config.toml  manifest.json  metrics.jsonl  timeline.json  rollouts/step-000012.arrow  checkpoints/step-000012/
evaluations/step-000012.jsonl  exports/step-000012/  skipped/  model/  model-best/  workers/  report.html
"""

from __future__ import annotations

import datetime
import os
import platform
import re
import subprocess
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf.control_groups import machine_memory, usable_cores
from rlhf.errors import CheckpointError, brief
from rlhf.plugins.requirements import installed_version
from rlhf.saved import Saved, SavedPart, validated
from rlhf.secrets import redact

from rlhf_runtime.checkpoint.atomic_files import (
    delete_old,
    discard_folder,
    publish_file,
    publish_folder,
    remove_leftovers,
    write_atomic,
)
from rlhf_runtime.checkpoint.json_values import read_json, write_json
from rlhf_runtime.checkpoint.store import BEST, SavedBest
from rlhf_runtime.output.folder_lock import FolderLock
from rlhf_runtime.output.metrics import MetricsLog
from rlhf_runtime.output.run_folder import clear, require_free, require_place, unmade

if TYPE_CHECKING:
    from rlhf.ops.batch import Batch


SCHEMA = 1
"""Version of the layout of ``manifest.json``. A reader refuses other versions."""
OBJECTS = "objects"
"""The folder of rows and models that were passed as Python objects (:mod:`rlhf_runtime.python.object_files`)."""
_OBJECT_NAME = re.compile(r"\w+-[0-9a-f]{12}(\.jsonl)?")
_STEP = re.compile(r"step-(\d{6,})(\.arrow|\.jsonl|-\d+\.safetensors)?")
_OF_STEPS = ("rollouts", "evaluations", "exports", "skipped")
"""Folders whose files are named by steps."""
SKIPPED_KEPT = 20
"""Number of batches of skipped optimizer steps that are kept. Older ones are deleted, so that a diverged run does not
fill the disk."""


class SavedPrecision(Saved):
    bf16: bool
    note: str


class SavedStart(SavedPart):
    """The fields of a start in ``manifest.json`` that a resume or an export reads."""

    hub: dict[str, str] = {}
    on_processor: SavedPrecision | None = None
    images: bool = False
    total_steps: int = 0


class SavedRun(SavedPart):
    """``manifest.json`` of a run directory."""

    starts: list[SavedStart]


class RunDirectory:
    """The folder of one run. :meth:`create` makes and locks it; the lock lasts until :meth:`close` or the end of the
    process."""

    def __init__(self, path: Path, lock: FolderLock | None, resumed: bool) -> None:
        self.path, self._place = path, path.resolve()
        self.resumed = resumed
        self.metrics = MetricsLog(path / "metrics.jsonl")
        self._lock = lock

    @classmethod
    def create(
        cls, path: Path | str, resume: bool = False, overwrite: bool = False, locked: bool = False
    ) -> RunDirectory:
        """Create the folder ``path`` for one run and lock it. An earlier run there is deleted if it finished no step or
        if ``overwrite`` is set. Only files that runs write are deleted. Without ``overwrite`` the folder
        ``precomputed`` is kept, because the new run can use it.

        Args:
            locked: whether the caller holds the lock of ``path``, and releases it.

        Raises ConfigError if another process is running in ``path``, if ``path`` already holds a run and neither
        ``resume`` nor ``overwrite`` is set, if its content is not recognised as a run, or if ``resume`` is set and it
        holds no run.
        """
        path = Path(path)
        require_place(path, resume)
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as cause:
            raise unmade(path, cause) from cause
        lock = None if locked else FolderLock(path)
        try:
            require_free(path, resume, overwrite)
            if not resume:
                clear(path, () if overwrite else ("precomputed",))
            for folder in (path, *(path / name for name in (*_OF_STEPS, "precomputed", OBJECTS))):
                remove_leftovers(folder)
        except BaseException:
            if lock is not None:
                lock.release()
            raise
        return cls(path, lock, resume)

    # ------------------------------------------------------------------------------------- records

    def write_config(self, toml: str) -> None:
        """Write ``config.toml``, the resolved run file. A new run deletes the folder ``objects`` of an earlier run
        (rows and models that were passed as Python objects), except files that the new run reads."""
        write_atomic(self.path / "config.toml", toml)
        # A resume with the same objects reads the files of the first start: their names hold the hash of their content.
        files = [] if self.resumed else sorted((self.path / OBJECTS).glob("*"))
        for old in files:
            if _OBJECT_NAME.fullmatch(old.name) and old.name not in toml:
                _remove(old)

    def write_manifest(self, seed: int, plugins: Sequence[Mapping[str, Any]], first_step: int, **facts: Any) -> None:
        """Write ``manifest.json``: seed, plugins with versions, hardware, software and code revision. A resume appends
        its start to the list of starts."""
        start = {
            "time": _timestamp(),
            "first_step": first_step,
            "seed": seed,
            "plugins": [dict(p) for p in plugins],
            "environment": environment(),
            **facts,
        }
        write_json(self.path / "manifest.json", {"schema": SCHEMA, "starts": [*self.starts(), start]}, nonfinite="mark")

    def write_end(self, status: str, reason: str, notes: Sequence[str] = ()) -> None:
        """Record how the run ended, in the last start of ``manifest.json``. A killed run has no such entry.

        Args:
            status: ``finished``, ``stopped`` or ``failed``.
            reason: the signal, the exhausted patience or the error; empty if the run finished.
            notes: the notes that the run has shown.
        """
        self.require_own()
        path = self.path / "manifest.json"
        manifest = read_json(path)
        texts = [redact(note) for note in notes]
        manifest["starts"][-1]["ended"] = {
            "time": _timestamp(),
            "status": status,
            "why": redact(reason),
            "notes": texts,
        }
        write_json(path, manifest, nonfinite="mark")

    def starts(self) -> list[dict[str, Any]]:
        """The manifest's entries about earlier starts."""
        return _starts(self.path / "manifest.json") if self.resumed else []

    @staticmethod
    def last_start(path: Path | str) -> dict[str, Any]:
        """The manifest's entry about the last start of the run in ``path``; empty if there is no manifest."""
        starts = _starts(Path(path) / "manifest.json")
        return starts[-1] if starts else {}

    def cut(self, step: int | None) -> None:
        """Delete the records of steps after the checkpoint of ``step``. Called on resume. None: there is no checkpoint,
        so the records of all steps are deleted."""
        last = -1 if step is None else step
        self.metrics.cut(last)
        for folder in _OF_STEPS:
            for number, path in step_files(self.path / folder):
                if number > last:
                    _remove(path)
        if (self.exported_best() or 0) > last:
            discard_folder(self.best_model)

    # --------------------------------------------------------------------------------------- places

    def rollouts(self, step: int) -> Path:
        """File for the samples that ``step`` was trained on."""
        return self.rollouts_of(self.path, step)

    @staticmethod
    def rollouts_of(folder: Path, step: int) -> Path:
        """File for the samples that ``step`` of the run in ``folder`` was trained on."""
        return folder / "rollouts" / f"step-{step:06d}.arrow"

    def evaluations(self, step: int) -> Path:
        """File for the answers of the evaluation after ``step``."""
        return self.path / "evaluations" / f"step-{step:06d}.jsonl"

    def exports(self, step: int) -> Path:
        """Folder for the model after ``step``. :meth:`export` fills it atomically."""
        return self.path / "exports" / f"step-{step:06d}"

    @property
    def timeline(self) -> Path:
        """The file for the run's timeline."""
        return self.path / "timeline.json"

    @property
    def model(self) -> Path:
        """Folder for the final model. :meth:`publish_model` fills it atomically."""
        return self.path / "model"

    @property
    def best_model(self) -> Path:
        """Folder for the model of the best evaluation so far."""
        return self.model_of("best")

    def exported_best(self) -> int | None:
        """The step of :attr:`best_model`, None if there is none."""
        file = self.best_model / BEST
        way_out = f"Restore it from a copy, or delete {file.parent}"
        return validated(SavedBest, read_json(file, way_out), file).step if file.is_file() else None

    def publish_best(self, step: int, facts: Mapping[str, Any], write: Callable[[Path], None]) -> None:
        """Call ``write`` to fill :attr:`best_model` atomically, and add ``best.json``: the step and ``facts``."""

        def write_both(folder: Path) -> None:
            write(folder)
            write_json(folder / BEST, {"step": step, **facts})

        publish_folder(self.best_model, write_both)

    def export(
        self,
        step: int,
        write: Callable[[Path], None],
        keep: int | None = None,
        note: Callable[[str], None] = warnings.warn,
    ) -> Path:
        """Call ``write`` to fill the export of ``step`` atomically, if it does not exist yet. Only the ``keep`` newest
        exports are kept (None: all). ``note`` is called about exports that cannot be deleted."""
        if not self.exports(step).exists():
            publish_folder(self.exports(step), write)
        if keep is not None:
            for _, path in step_files(self.path / "exports")[:-keep]:
                delete_old(path, note)
        return self.exports(step)

    def model_of(self, role: str) -> Path:
        """Folder for the final model of a role other than the policy."""
        return self.path / f"model-{role}"

    def publish_model(self, write: Callable[[Path], None], role: str | None = None) -> None:
        """Call ``write`` to fill ``model/``, or the folder of ``role``, atomically."""
        publish_folder(self.model if role is None else self.model_of(role), write)

    def keep_batch(self, step: int, reason: str, batch: Batch) -> Path:
        """Save the batch of a skipped optimizer step of ``step`` as safetensors, for debugging: ``tok.<column>``,
        ``seq.<column>``, ``unit.<column>`` and the layout. Returns the file."""
        from safetensors.torch import save_file

        folder = self.path / "skipped"
        tensors = {name: getattr(batch, name) for name in ("ids_N", "lens_B", "unit_B", "role_B")}
        for level in ("tok", "seq", "unit"):
            tensors |= {f"{level}.{name}": values for name, values in getattr(batch, level).items()}
        numbers = [int(path.stem[-4:]) for saved_step, path in step_files(folder) if saved_step == step]
        number = 1 + max(numbers, default=0)  # not their count: only the last batches are kept
        path = folder / f"step-{step:06d}-{number:04d}.safetensors"
        copies = {name: values.detach().cpu().contiguous().clone() for name, values in tensors.items()}
        publish_file(path, lambda file: save_file(copies, file, {"reason": reason}))
        for _, old in step_files(folder)[:-SKIPPED_KEPT]:
            old.unlink()
        return path

    # ----------------------------------------------------------------------------------------- lock

    def require_own(self) -> None:
        """Raises CheckpointError if :attr:`path` names another folder than at the start, and BusyFolderError if the
        folder belongs to another run (:meth:`FolderLock.require_own`)."""
        if (place := self.path.resolve()) != self._place:
            raise CheckpointError(
                f"run.output {self.path} was {self._place} when the run started, and is {place} now: a plugin has "
                "changed the current folder of the run (os.chdir), or a link was changed. Nothing was saved there. "
                f"Continue from {self._place} with --resume, without this change or with an absolute run.output."
            )
        FolderLock.require_own(self.path)

    def close(self) -> None:
        """Release the lock of the folder."""
        if self._lock is not None:
            self._lock.release()

    def __enter__(self) -> RunDirectory:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _timestamp() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def _starts(manifest: Path) -> list[dict[str, Any]]:
    """Raises CheckpointError if the manifest is not one of a run."""
    if not manifest.exists():
        return []
    way_out = "Restore it from a copy, or delete it: a resume then looks up the commits of hub names again"
    saved: dict[str, Any] = read_json(manifest, way_out)
    validated(SavedRun, saved, manifest)
    if (layout := saved.get("schema", SCHEMA)) != SCHEMA:
        raise CheckpointError(
            f"the layout of {manifest} is version {brief(layout)}, this release reads version {SCHEMA}. Continue with "
            "the release that wrote it. Nothing was changed."
        )
    starts: list[dict[str, Any]] = saved["starts"]
    return starts


def step_files(folder: Path) -> list[tuple[int, Path]]:
    """(step, path) of the files or folders of steps in a folder, in order."""
    paths = folder.iterdir() if folder.is_dir() else []
    return sorted((int(m[1]), p) for p in paths if (m := _STEP.fullmatch(p.name)))


def _remove(path: Path) -> None:
    if path.is_dir():
        discard_folder(path)
    else:
        path.unlink()


_PACKAGES = ("torch", "transformers", "datasets", "safetensors", "pydantic", "pluggy")


def environment() -> dict[str, Any]:
    """Hardware, software versions and code revisions, for ``manifest.json``. The names of the machine and its user are
    not recorded. Does not import torch and needs no device."""
    return {
        "cpu": _cpu_model(),
        "cores": usable_cores(),
        "memory_gib": _memory_gib(),
        "gpus": driver_gpus(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "packages": {name: installed_version(name) for name in _PACKAGES},
        "code": {
            "rlhf": git_revision(Path(__file__).parent),
            "working_directory": git_revision(Path.cwd()),
        },
    }


def git_revision(folder: Path) -> str | None:
    """Commit of the git repository that contains ``folder``, with ``+changes`` if tracked files differ. None outside a
    repository, and for a package in ``site-packages``."""
    if "site-packages" in folder.parts:
        return None
    revision = _output("git", "-C", str(folder), "rev-parse", "HEAD")
    if not revision:
        return None
    changes = _output("git", "-C", str(folder), "status", "--porcelain", "--untracked-files=no")
    return revision + ("+changes" if changes else "")


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _memory_gib() -> float | None:
    """The main memory that this process may use."""
    if (memory := machine_memory()) is not None:
        return round((memory.limit or memory.total) / 2**30, 1)
    try:
        return round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1)
    except (ValueError, OSError, AttributeError):
        return None


def driver_gpus() -> list[str]:
    """``name, memory, driver version`` of each GPU, from the driver. Asking torch would start CUDA in this process."""
    text = _output("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader")
    return [line.strip() for line in text.splitlines() if line.strip()]


def _output(*command: str) -> str:
    """A program's output. Empty if the program is not installed, fails or hangs, because this must not stop a run."""
    try:
        process = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return process.stdout.strip() if process.returncode == 0 else ""
