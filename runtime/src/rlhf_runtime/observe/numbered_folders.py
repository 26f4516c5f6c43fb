"""Default folders of runs, used where ``run.output`` is not set: ``runs/1``, ``runs/2``, ... and the link
``runs/latest`` to the newest of them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from rlhf.errors import ConfigError

from rlhf_runtime.observe.folder_lock import FolderLock
from rlhf_runtime.observe.run_folder import is_free

LATEST = Path("runs/latest")
"""Value of ``run.output`` where a run file does not set it."""


def default_folder(again: bool) -> Path:
    """The folder of a run whose run file does not set ``run.output``.

    Args:
        again: True: the newest folder, which the run resumes or overwrites. False: a new folder, or the newest one
            where the run in it finished no step and is no longer running.

    Raises ConfigError where ``runs/latest`` is a folder instead of a link, and holds a run.
    """
    if LATEST.is_dir() and not LATEST.is_symlink():  # a run was given it as run.output
        if not again and not is_free(LATEST):
            raise ConfigError(
                f"{LATEST} is a folder with a run, and cannot be the link to the newest run. Rename it (mv {LATEST} "
                f"{LATEST.parent / '1'}), name another folder with --output, continue it with --resume, or replace it "
                "with --overwrite."
            )
        return LATEST
    if again:
        return LATEST.parent / os.readlink(LATEST) if LATEST.is_symlink() else LATEST
    newest = max((int(p.name) for p in LATEST.parent.glob("*") if p.name.isdecimal()), default=0)
    folder = LATEST.parent / str(newest)
    return folder if newest and is_free(folder) and _idle(folder) else LATEST.parent / str(newest + 1)


def link_latest(folder: Path) -> None:
    """Make ``runs/latest`` a link to ``folder``. Does nothing where ``folder`` is not one of the numbered folders, or
    where ``runs/latest`` is a real folder."""
    if not _is_linked(folder):
        return
    link = LATEST.with_name(f".{LATEST.name}-{os.getpid()}")
    try:
        link.unlink(missing_ok=True)
        link.symlink_to(folder.name)
        os.replace(link, LATEST)
    except OSError as cause:
        raise ConfigError(
            f"{LATEST} cannot be made a link to {folder}: {cause.strerror}. Name a folder with --output."
        ) from cause


def check_models(folder: Path, models: Mapping[str, str]) -> None:
    """Raises ConfigError where the run in ``folder`` becomes ``runs/latest`` and names a model by this link.

    Args:
        models: {role: path of its model}.
    """
    for role, model in models.items() if _is_linked(folder) else ():
        if Path(model).parts[:2] == LATEST.parts:
            now = LATEST.parent / os.readlink(LATEST) if LATEST.is_symlink() else LATEST.parent / "NUMBER"
            raise ConfigError(
                f"the model of role {role!r} is {model}, and {LATEST} will be a link to this run, {folder}, as soon as "
                f"it starts. Name the run: {now.joinpath(*Path(model).parts[2:])}"
            )


def _is_linked(folder: Path) -> bool:
    """Whether ``runs/latest`` is a link to the run in ``folder`` while it is the newest."""
    is_folder = LATEST.exists() and not LATEST.is_symlink()
    return folder.parent == LATEST.parent and folder.name.isdecimal() and not is_folder


def _idle(folder: Path) -> bool:
    """Whether no run is active in this folder."""
    try:
        FolderLock.check(folder)
    except ConfigError:
        return False
    return True
