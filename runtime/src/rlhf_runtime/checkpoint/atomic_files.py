"""Files and folders that are complete or absent, even if the process dies or the power fails."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, TypeVar

T = TypeVar("T")
TEMPORARY = ".saving-"
"""Prefix of names that are being written. They may be deleted if no run holds the folder."""
DISCARDED = ".discarded-"
"""Prefix of names that are being deleted. They may be deleted if no run holds the folder."""


def sync_file(path: Path) -> None:
    """Force a file's bytes, or a folder's names, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(root: Path) -> None:
    """Force all files and names below a folder to the disk."""
    for folder, _, names in os.walk(root, topdown=False):
        for name in names:
            sync_file(Path(folder, name))
        sync_file(Path(folder))


def write_atomic(path: Path, text: str) -> None:
    """Replace the content of ``path`` by ``text`` (UTF-8). Readers see the complete old or new file, even after a
    crash."""
    replace_file(path, lambda file: file.write(text.encode()))


def replace_file(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """:func:`write_atomic` for a file that ``write`` fills."""
    temporary = path.with_name(f"{TEMPORARY}{path.name}")
    try:
        with temporary.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_file(path.parent)


def publish_folder(path: Path, write: Callable[[Path], T]) -> T:
    """``write`` fills a temporary folder beside ``path``, which is then renamed to ``path``. Returns the result of
    ``write``. An existing folder is replaced. It is deleted last, because on NFS that fails while a reader has one of
    its files open.

    After a crash ``path`` is the old folder, the new one, or (between two renames) absent, but never incomplete.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{TEMPORARY}{path.name}")
    shutil.rmtree(temporary, ignore_errors=True)
    old: Path | None = None
    try:
        temporary.mkdir()
        result = write(temporary)
        sync_tree(temporary)
        old = _set_aside(path)
        os.rename(temporary, path)
    except BaseException:
        if old is not None:
            os.rename(old, path)
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    sync_file(path.parent)
    if old is not None:
        shutil.rmtree(old, ignore_errors=True)
    return result


def publish_file(path: Path, write: Callable[[Path], object]) -> None:
    """:func:`publish_folder` for one file whose writer opens its own temporary files beside it."""
    place = path.with_name(f"{TEMPORARY}{path.name}")
    shutil.rmtree(place, ignore_errors=True)
    try:
        place.mkdir(parents=True)
        write(place / path.name)
        sync_file(place / path.name)
        os.replace(place / path.name, path)
    finally:
        shutil.rmtree(place, ignore_errors=True)
    sync_file(path.parent)


def discard_folder(path: Path) -> None:
    """Delete a folder. A crash never leaves a part of it under its name. Files that a reader on NFS keeps open are left
    to :func:`remove_leftovers`."""
    if (old := _set_aside(path)) is not None:
        shutil.rmtree(old, ignore_errors=True)


def delete_old(path: Path, note: Callable[[str], None]) -> None:
    """:func:`discard_folder` for a folder that newer files replace. If it fails, ``note`` is called with the reason."""
    try:
        if (old := _set_aside(path)) is not None:
            path = old
            shutil.rmtree(old)
    except OSError as cause:
        note(f"{path} is no longer needed and could not be deleted: {cause}. Delete it yourself.")


def _set_aside(path: Path) -> Path | None:
    """Rename a folder that is to be deleted. Returns its new path; None if there is no folder."""
    if not path.exists():
        return None
    discarded = path.with_name(f"{DISCARDED}{path.name}")
    shutil.rmtree(discarded, ignore_errors=True)
    if discarded.is_dir():  # a reader on NFS has one of its files open
        discarded = Path(tempfile.mkdtemp(prefix=f"{discarded.name}-", dir=path.parent))
    # The new folder of mkdtemp() is empty, and rename() replaces an empty folder.
    os.rename(path, discarded)
    sync_file(path.parent)
    return discarded


def remove_leftovers(folder: Path) -> list[str]:
    """Delete temporary files that killed processes left in ``folder``. Returns the deleted names. Call it only while no
    other run writes."""
    removed = []
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        if path.name.startswith((TEMPORARY, DISCARDED)):
            with contextlib.suppress(OSError):  # a reader on NFS has one of its files open: the next start tries again
                if path.is_dir():
                    shutil.rmtree(path)
                else:
                    path.unlink(missing_ok=True)
                removed.append(path.name)
    return removed
