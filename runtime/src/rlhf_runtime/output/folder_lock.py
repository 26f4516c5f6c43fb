"""A lock that keeps two runs from writing into one folder. The system releases it when the process ends, so a killed
run leaves nothing to clean up."""

from __future__ import annotations

import errno
import fcntl
import os
import platform
import struct
import sys
from pathlib import Path
from typing import ClassVar

from rlhf.errors import ConfigError

_FLOCK, _TYPE = ("qqihh", 3) if sys.platform == "darwin" else ("hhqqi4x", 0)
"""The system's ``struct flock``, and the position of ``l_type`` in it."""


LOCK = ".lock"
"""Name of the locked file."""


class BusyFolderError(ConfigError):
    """Another run uses the folder, or finished a step there."""


class FolderLock:
    """Held from construction to :meth:`release` or the end of the process. Raises BusyFolderError if another run
    holds it.

    It is a POSIX record lock. Unlike ``flock``, it is not inherited by forked worker processes, which may outlive a
    killed driver. A record lock does not exclude a second lock of the same process, so ``_locked_folders``
    lists the folders that this process has locked.
    """

    _locked_folders: ClassVar[dict[str, os.stat_result]] = {}
    """{folder: its locked file}."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / LOCK
        self._key = os.path.realpath(folder)
        self._require_other(folder)
        try:
            descriptor = os.open(self._file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as cause:
            raise unusable(folder, "written to", cause) from cause
        try:
            _lock(folder, descriptor)
            os.ftruncate(descriptor, 0)
            os.write(descriptor, f"process {os.getpid()} on {platform.node()}\n".encode())
        except OSError as cause:  # a full disk
            os.close(descriptor)
            raise unusable(folder, "written to", cause) from cause
        except ConfigError:
            os.close(descriptor)
            raise
        self._descriptor: int | None = descriptor
        self._locked_folders[self._key] = os.fstat(descriptor)

    @classmethod
    def check(cls, folder: Path) -> None:
        """Raises ConfigError if another run holds ``folder``, or if the folder cannot be locked. Takes no lock and
        writes nothing."""
        cls._require_other(folder)  # first: closing a descriptor releases this process's own lock
        try:
            descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CLOEXEC)
        except (FileNotFoundError, NotADirectoryError):
            return
        except OSError as cause:
            raise unusable(folder, "written to", cause) from cause
        try:
            if _is_locked(descriptor):
                raise _busy_error(folder, descriptor)
        except OSError as cause:
            raise _without_locks(folder, cause) from cause
        finally:
            os.close(descriptor)

    @classmethod
    def require_own(cls, folder: Path) -> None:
        """Raises BusyFolderError if ``folder``, which this process has locked, was deleted and another run has created
        it again. The lock does not prevent this, because it belongs to the file and not to its name."""
        locked_file = cls._locked_folders.get(os.path.realpath(folder))
        try:
            replaced = locked_file is not None and not os.path.samestat(locked_file, os.stat(folder / LOCK))
        except OSError:  # no other run has locked the folder
            return
        if replaced:
            raise BusyFolderError(
                f"{folder} was deleted while this run worked in it, and another run has created it again. It belongs "
                "to that run, so nothing more is saved there. Start this run again with another --output."
            )

    @classmethod
    def is_held(cls, folder: Path) -> bool:
        """Whether a process holds the lock of ``folder``. Takes no lock and writes nothing, so a run that starts at the
        same time is not refused."""
        # First, because closing a descriptor of the file would release this process's own lock.
        if os.path.realpath(folder) in cls._locked_folders:
            return True
        try:
            descriptor = os.open(folder / LOCK, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            return _is_locked(descriptor)
        except OSError:  # a file system without locks, where no run can start
            return False
        finally:
            os.close(descriptor)

    @classmethod
    def _require_other(cls, folder: Path) -> None:
        if os.path.realpath(folder) in cls._locked_folders:
            raise BusyFolderError(f"another run of this process is using {folder}. Choose another --output.")

    def release(self) -> None:
        """Release the lock. Safe to call twice."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
            self._locked_folders.pop(self._key, None)


def _lock(folder: Path, descriptor: int) -> None:
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as cause:
        if cause.errno in (errno.EACCES, errno.EAGAIN):
            raise _busy_error(folder, descriptor) from cause
        raise _without_locks(folder, cause) from cause


def _is_locked(descriptor: int) -> bool:
    """Whether another process holds the lock of this file."""
    query = [0] * 5
    query[_TYPE] = fcntl.F_WRLCK
    answer = fcntl.fcntl(descriptor, fcntl.F_GETLK, struct.pack(_FLOCK, *query))
    return bool(struct.unpack(_FLOCK, answer)[_TYPE] != fcntl.F_UNLCK)


def _busy_error(folder: Path, descriptor: int) -> BusyFolderError:
    holder = os.pread(descriptor, 200, 0).decode(errors="replace").strip() or "unknown"
    return BusyFolderError(
        f"another run is using {folder} ({holder}). Wait for it, stop it, or choose another --output."
    )


def _without_locks(folder: Path, cause: OSError) -> ConfigError:
    return ConfigError(
        f"run.output {folder} cannot be locked: {cause.strerror}. A lock prevents two runs from using one folder, so "
        "its file system must support locks: mount it with locks (Lustre: the option flock), or choose another "
        "--output."
    )


def unusable(folder: Path, use: str, cause: OSError) -> ConfigError:
    return ConfigError(
        f"run.output {folder} cannot be {use}: {cause.strerror}. Choose another --output, or grant access to this one."
    )
