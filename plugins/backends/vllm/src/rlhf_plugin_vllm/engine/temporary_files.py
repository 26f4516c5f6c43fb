"""What an engine puts outside its processes' memory, under names of its own, and taking it away again.

vLLM leaves behind the file by which an engine's workers find each other; of a worker that was killed also its sockets,
its queues, and the memory through which workers on a CPU add up what they computed.

Where the process itself is killed, nobody is left to take anything away: the next engine on the machine does it.
Whoever lives holds a lock on a file in its folder, which also says what else is its own.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import tempfile
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any
from uuid import uuid4

SOCKETS = "VLLM_RPC_BASE_PATH"
"""vLLM's variable: where it puts its sockets."""
SHARED_MEMORY = Path("/dev/shm")
PREFIX = "rlhf-vllm-"
OWNER = "owner"
"""File in the folder, locked as long as its engine's process lives: JSON, {"meeting": ..., "segments": [...]}."""
_MEETING = re.compile(r"vllm_dist_[0-9a-f]{32}")
_PYTHONS = re.compile(r"/dev/shm/(psm_\w+)")
"""In a list of mappings: segments that Python made."""


class TemporaryFiles:
    """Of one engine. It is removed by :meth:`remove`, or where nobody calls that, with this object or the process.

    Args:
        shared: the engine computes in this process, whose engines share a process group: it reads the file of the first
            until the last is closed.
    """

    def __init__(self, shared: bool) -> None:
        self.shared = shared
        place = os.environ.get(SOCKETS)
        sweep(Path(place or tempfile.gettempdir()))
        self.folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=place))
        self.meeting = f"vllm_dist_{uuid4().hex}"
        """Name of the workers' file; what they share on a CPU is called after it."""
        self._segments: list[str] = []
        self._buffers: list[weakref.ref[Any]] = []
        """Those of the segments that vLLM would remove in this process too."""
        self._owner = _locked(self.folder)
        self._tell()
        self.remove = weakref.finalize(
            self, _remove, os.getpid(), self.folder, self.meeting, self._segments, self._buffers, self._owner
        )
        """Call it once the workers have ended; a second time does nothing."""

    @property
    def variables(self) -> dict[str, str]:
        """To be in the environment of the engine's start."""
        return {SOCKETS: str(self.folder)}

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """An engine that is started inside puts its file here."""
        from vllm.v1.executor import multiproc_executor, uniproc_executor

        modules: tuple[Any, ...] = (multiproc_executor, uniproc_executor)
        originals = [module.get_file_store_init_method for module in modules]
        for module in modules:
            module.get_file_store_init_method = lambda: f"file://{self.folder / self.meeting}"
        try:
            yield
        finally:
            for module, original in zip(modules, originals, strict=True):
                module.get_file_store_init_method = original

    def note(self, executor: Any) -> None:
        """Remember the queues of an engine that has started: those that this process shares with its workers, and
        those among the workers, which are mapped in them and not here."""
        workers = getattr(executor, "workers", None)
        if not workers:
            return
        self._buffers.append(weakref.ref(executor.rpc_broadcast_mq.buffer))
        shared = [executor.rpc_broadcast_mq, *(w.worker_response_mq for w in workers)]
        self._segments += [queue.handle.buffer_handle[3] for queue in shared]
        among = {name for worker in workers for name in _mapped(worker.proc.pid)}
        self._segments += sorted(among - _mapped(os.getpid()))
        self._tell()

    def _tell(self) -> None:
        """Whoever finds this after a death knows what to remove."""
        text = json.dumps({"meeting": self.meeting, "segments": self._segments}).encode()
        os.pwrite(self._owner, text, 0)  # it only grows


def _mapped(process: int) -> set[str]:
    try:
        return set(_PYTHONS.findall(Path(f"/proc/{process}/maps").read_text()))
    except OSError:  # it has ended, or the system has no such list
        return set()


def sweep(place: Path) -> None:
    """Take away what engines left behind whose process was killed: folders in ``place``, and memory that they name."""
    for folder in place.glob(f"{PREFIX}*"):
        try:
            file = os.open(folder / OWNER, os.O_RDWR | os.O_NOFOLLOW)
        except OSError:  # it is being made or removed, or is somebody else's
            continue
        try:
            if os.fstat(file).st_uid != os.getuid():  # anybody may write to a temporary folder
                continue
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            left = json.loads(os.read(file, 2**20) or b"{}")
        except (OSError, ValueError):  # its owner lives
            continue
        else:
            _remove_all(folder, left.get("meeting", ""), left.get("segments", []))
        finally:
            os.close(file)


def _locked(folder: Path) -> int:
    """The folder's file, which has its name once it is locked."""
    file = os.open(folder / f"{OWNER}.new", os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(file, fcntl.LOCK_EX)
    os.rename(folder / f"{OWNER}.new", folder / OWNER)
    return file


def _remove(
    process: int, folder: Path, meeting: str, segments: list[str], buffers: list[weakref.ref[Any]], owner: int
) -> None:
    if os.getpid() != process:  # a worker that was forked from this process
        return
    for buffer in buffers:
        if (alive := buffer()) is not None:
            alive.is_creator = False  # it would not find its segment
    _remove_all(folder, meeting, segments)
    os.close(owner)


def _remove_all(folder: Path, meeting: str, segments: list[str]) -> None:
    for name in segments:
        try:
            segment = SharedMemory(name)
        except FileNotFoundError:  # whoever made it has removed it
            continue
        segment.unlink()
        segment.close()
    for path in SHARED_MEMORY.glob(f"{meeting}*") if _MEETING.fullmatch(meeting) else ():
        path.unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)
