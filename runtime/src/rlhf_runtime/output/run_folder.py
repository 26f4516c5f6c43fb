"""Checks which folder a run may use, and deletes the files of an earlier run there. If ``run.output`` is not set, runs
use the folders ``runs/1``, ``runs/2``, ..., and ``runs/latest`` is a link to the newest one."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Collection, Mapping
from pathlib import Path

from rlhf.errors import ConfigError, RlhfError

from rlhf_runtime.checkpoint.atomic_files import discard_folder
from rlhf_runtime.checkpoint.json_values import read_json
from rlhf_runtime.output.folder_lock import BusyFolderError, FolderLock, unusable
from rlhf_runtime.output.metrics import recorded_steps

_HOLDS_A_RUN = ("config.toml", "manifest.json", "metrics.jsonl", "checkpoints", "model")
_RUN_ITEMS = (*_HOLDS_A_RUN, "rollouts", "evaluations", "exports", "skipped", "precomputed", "timeline.json", "workers")
"""The names that a run writes, in addition to ``model-<role>``. Launchers write ``workers``, the output of workers, and
``stall-<role>-<rank>.txt``, reports about stalled workers."""
REPORT = "report.html"
"""The page of a run. Other programs use this name too, so the file is replaced only if a run wrote it."""
REPORT_MARK = b'<meta name="generator" content="rlhf report">'
"""Mark in the head of every such page."""


def is_free(path: Path) -> bool:
    """Whether a run may start in ``path``: the folder holds no run, or a run that finished no step."""
    return not _present(path) or (_recognised(path) and not _finished_a_step(path))


def check_folder(path: Path | str, resume: bool = False, overwrite: bool = False) -> None:
    """Raises ConfigError if a run with these options may not use ``path``. Changes nothing."""
    path = Path(path)
    require_place(path, resume)
    parent = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
    try:
        os.rmdir(tempfile.mkdtemp(prefix=".writable-", dir=parent))  # permission bits do not prove write access
    except OSError as cause:
        raise (unusable(path, "written to", cause) if parent == path else unmade(path, cause)) from cause
    FolderLock.check(path)
    require_free(path, resume, overwrite)


def require_place(path: Path, resume: bool) -> None:
    """Raises ConfigError if ``path`` is a file, or there is no run to resume."""
    if path.exists() and not path.is_dir():
        raise ConfigError(f"run.output is {path}, which is a file; it must be a folder that exists or can be created.")
    if resume and not _present(path):
        raise ConfigError(
            f"there is no run to resume in {path}. Omit --resume to start a run there, or set run.output to "
            f"the folder of the run."
        )


def require_free(path: Path, resume: bool, overwrite: bool) -> None:
    """Raises ConfigError if the folder holds a run and neither ``resume`` nor ``overwrite`` is set."""
    present = _present(path)
    if resume or is_free(path):
        return
    if not _recognised(path):
        raise ConfigError(
            f"{path} already holds {', '.join(present)}, but no manifest.json of a run, so nothing in it is "
            "replaced. Choose another folder with --output. Nothing was changed."
        )
    if not overwrite:
        begun = "checkpoints" in present
        way = "Continue it with --resume" if begun else "It has no checkpoint: --resume starts it from step 0"
        raise BusyFolderError(
            f"{path} already holds a run ({', '.join(present)}). {way}, delete it with --overwrite, or choose another "
            "folder with --output. Nothing was changed."
        )


def _recognised(path: Path) -> bool:
    """Whether ``path`` has a ``manifest.json`` that a run wrote."""
    try:
        manifest = read_json(path / "manifest.json")
    except (OSError, RlhfError):
        return False
    return isinstance(manifest, dict) and manifest.get("schema") == 1 and isinstance(manifest.get("starts"), list)


def _finished_a_step(path: Path) -> bool:
    """Whether a step was recorded or anything was saved. Also True if the record is damaged, because it may contain
    steps."""
    if os.path.lexists(path / "checkpoints") and not (path / "checkpoints").is_dir():  # a link to a missing disk
        return True
    if any((path / "checkpoints").glob("step-*")) or saved_state(path):
        return True
    try:
        return any(step > 0 for step in recorded_steps(path / "metrics.jsonl"))
    except (OSError, RlhfError):
        return True


def saved_state(path: Path) -> list[str]:
    """The exports and models in ``path``. A run that finished no step cannot have saved any."""
    return [
        str(item.relative_to(path)) for pattern in ("exports/step-*", "model*") for item in sorted(path.glob(pattern))
    ]


def is_report(page: Path) -> bool:
    """Whether the file is a page that shows runs."""
    with page.open("rb") as file:
        return REPORT_MARK in file.read(2000)


def clear(path: Path, keep: Collection[str]) -> None:
    """Delete the files that a run wrote, except ``keep``. The manifest is deleted last, because it identifies the
    folder as a run."""
    items = [path / name for name in _RUN_ITEMS if name not in keep]
    items += sorted(item for pattern in ("model-*", "stall-*.txt") for item in path.glob(pattern))
    items += [page for page in path.glob(REPORT) if page.is_file() and is_report(page)]
    for item in sorted(items, key=lambda item: item.name == "manifest.json"):
        if item.is_dir() and not item.is_symlink():
            discard_folder(item)
        elif item.is_symlink() or item.exists():
            item.unlink()


def unmade(path: Path, cause: OSError) -> ConfigError:
    return ConfigError(f"run.output {path} cannot be created: {cause.strerror}. Choose another folder.")


def _present(path: Path) -> list[str]:
    return [name for name in _HOLDS_A_RUN if (path / name).exists()]


LATEST = Path("runs/latest")
"""Value of ``run.output`` if a run file does not set it."""


def default_folder(takes_newest: bool) -> Path:
    """The folder of a run whose run file does not set ``run.output``.

    Args:
        takes_newest: True: the newest folder, which the run resumes or overwrites. False: a new folder, or the newest
            folder if the run in it finished no step and is no longer running.

    Raises ConfigError if ``runs/latest`` is a folder instead of a link, and holds a run.
    """
    if LATEST.is_dir() and not LATEST.is_symlink():  # a run had it as run.output
        if not takes_newest and not (is_free(LATEST) and _idle(LATEST)):
            raise ConfigError(
                f"{LATEST} is a folder with a run, so it cannot be the link to the newest run. Rename it (mv {LATEST} "
                f"{LATEST.parent / '1'}), name another folder with --output, continue it with --resume, or replace it "
                "with --overwrite."
            )
        return LATEST
    if takes_newest:
        return LATEST.parent / os.readlink(LATEST) if LATEST.is_symlink() else LATEST
    newest = max((int(p.name) for p in LATEST.parent.glob("*") if p.name.isdecimal()), default=0)
    folder = LATEST.parent / str(newest)
    return folder if newest and is_free(folder) and _idle(folder) else LATEST.parent / str(newest + 1)


def link_latest(folder: Path) -> None:
    """Make ``runs/latest`` a link to ``folder``. Does nothing if ``folder`` is not one of the numbered folders, or if
    ``runs/latest`` is a real folder."""
    if not _is_linked(folder):
        return
    link = LATEST.with_name(f".{LATEST.name}-{folder.name}")  # only this run, which holds the folder, uses this name
    try:
        link.unlink(missing_ok=True)
        link.symlink_to(folder.name)
        os.replace(link, LATEST)
    except OSError as cause:
        raise ConfigError(
            f"the link {LATEST} to {folder} cannot be created: {cause.strerror}. Name a folder with --output."
        ) from cause


def is_latest(folder: Path) -> bool:
    """Whether ``runs/latest`` is a link to ``folder``."""
    return LATEST.is_symlink() and LATEST.resolve() == folder.resolve()


def check_models(folder: Path, models: Mapping[str, str]) -> None:
    """Raises ConfigError if the run in ``folder`` becomes ``runs/latest`` and the path of one of its models contains
    this link.

    Args:
        models: {role: path of its model}.
    """
    for role, model in models.items() if _is_linked(folder) else ():
        if Path(model).parts[:2] == LATEST.parts:
            latest = LATEST.parent / os.readlink(LATEST) if LATEST.is_symlink() else LATEST.parent / "NUMBER"
            raise ConfigError(
                f"the model of role {role!r} is {model}, but {LATEST} will be a link to this run, {folder}, as soon as "
                f"it starts. Name the other run instead: {latest.joinpath(*Path(model).parts[2:])}"
            )


def _is_linked(folder: Path) -> bool:
    """Whether ``runs/latest`` links to the run in ``folder`` while that run is the newest."""
    is_folder = LATEST.exists() and not LATEST.is_symlink()
    return folder.parent == LATEST.parent and folder.name.isdecimal() and not is_folder


def _idle(folder: Path) -> bool:
    """Whether no run is active in this folder."""
    try:
        FolderLock.check(folder)
    except ConfigError:
        return False
    return True
