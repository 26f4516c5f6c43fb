"""Unique names and removal of the files and shared memory of an engine.

vLLM does not remove the file through which an engine's workers find each other. If a worker is killed, vLLM also leaves
its sockets and queues, and the shared memory in which workers on a CPU sum their results.

When the engine's own process is killed, the next engine on the machine removes its files. Every living engine holds a
lock on a file in its folder; the file lists the engine's shared memory.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import tempfile
import weakref
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any
from uuid import uuid4

SOCKETS = "VLLM_RPC_BASE_PATH"
"""vLLM's environment variable with the folder of its sockets."""
SHARED_MEMORY = Path("/dev/shm")
PREFIX = "rlhf-vllm-"
OWNER = "owner"
"""File in the folder, locked while the engine's process lives. JSON: {"meeting": ..., "segments": [...]}."""
_MEETING = re.compile(r"vllm_dist_[0-9a-f]{32}")
_PYTHONS = re.compile(r"/dev/shm/(psm_\w+)")
"""Matches shared memory made by Python, in a /proc maps file."""


class TemporaryFiles:
    """The files and shared memory of one engine. :meth:`remove` removes them; otherwise they are removed when this
    object is collected or the process exits.

    Args:
        shared: the engine computes in this process. All such engines share one process group, which reads the first
            engine's file until the last engine is closed.
    """

    def __init__(self, shared: bool) -> None:
        self.shared = shared
        place = os.environ.get(SOCKETS)
        sweep(Path(place or tempfile.gettempdir()))
        self.folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=place))
        self.meeting = f"vllm_dist_{uuid4().hex}"
        """Name of the file through which workers meet; also the prefix of their shared memory on a CPU."""
        self._segments: list[str] = []
        self._buffers: list[weakref.ref[Any]] = []
        """Buffers of segments that vLLM would also remove in this process."""
        self._owner = _locked(self.folder)
        self._write_owner_file()
        self.remove = weakref.finalize(
            self, _remove, os.getpid(), self.folder, self.meeting, self._segments, self._buffers, self._owner
        )
        """Call this after the workers have ended. A second call does nothing."""

    @property
    def variables(self) -> dict[str, str]:
        """Environment variables for the start of the engine."""
        return {SOCKETS: str(self.folder)}

    def note(self, executor: Any) -> None:
        """Record the queues of a started engine: those between this process and its workers, and those among workers,
        which only the workers map."""
        workers = getattr(executor, "workers", None)
        if not workers:
            return
        self._buffers.append(weakref.ref(executor.rpc_broadcast_mq.buffer))
        shared = [executor.rpc_broadcast_mq, *(w.worker_response_mq for w in workers)]
        self._segments += [queue.handle.buffer_handle[3] for queue in shared]
        worker_segments = {name for worker in workers for name in _mapped(worker.proc.pid)}
        self._segments += sorted(worker_segments - _mapped(os.getpid()))
        self._write_owner_file()

    def _write_owner_file(self) -> None:
        """Write the names of everything that another process must remove if this process is killed."""
        text = json.dumps({"meeting": self.meeting, "segments": self._segments}).encode()
        os.pwrite(self._owner, text, 0)  # the text never gets shorter


def _mapped(process: int) -> set[str]:
    try:
        return set(_PYTHONS.findall(Path(f"/proc/{process}/maps").read_text()))
    except OSError:  # the process has ended, or the system has no /proc
        return set()


def sweep(place: Path) -> None:
    """Remove leftovers of engines of killed processes: folders in ``place``, and the shared memory that they list."""
    for folder in place.glob(f"{PREFIX}*"):
        try:
            file = os.open(folder / OWNER, os.O_RDWR | os.O_NOFOLLOW)
        except OSError:  # it is being created or removed, or belongs to another user
            continue
        try:
            if os.fstat(file).st_uid != os.getuid():  # every user may write to a temporary folder
                continue
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            left = json.loads(os.read(file, 2**20) or b"{}")
        except (OSError, ValueError):  # its owner is alive
            continue
        else:
            _remove_all(folder, left.get("meeting", ""), left.get("segments", []))
        finally:
            os.close(file)


def _locked(folder: Path) -> int:
    """Make the folder's file. It gets its name only after it is locked."""
    file = os.open(folder / f"{OWNER}.new", os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(file, fcntl.LOCK_EX)
    os.rename(folder / f"{OWNER}.new", folder / OWNER)
    return file


def _remove(
    process: int, folder: Path, meeting: str, segments: list[str], buffers: list[weakref.ref[Any]], owner: int
) -> None:
    if os.getpid() != process:  # a worker that was forked from the engine's process
        return
    for buffer in buffers:
        if (alive := buffer()) is not None:
            alive.is_creator = False  # vLLM would fail to find the segment
    _remove_all(folder, meeting, segments)
    os.close(owner)


def _remove_all(folder: Path, meeting: str, segments: list[str]) -> None:
    for name in segments:
        try:
            segment = SharedMemory(name)
        except FileNotFoundError:  # its creator has removed it
            continue
        segment.unlink()
        segment.close()
    for path in SHARED_MEMORY.glob(f"{meeting}*") if _MEETING.fullmatch(meeting) else ():
        path.unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)
