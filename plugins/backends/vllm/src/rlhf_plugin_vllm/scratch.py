"""What an engine puts outside its processes' memory, under names of its own, and taking it away again.

vLLM leaves behind the file by which an engine's workers find each other; of a worker that was killed also its sockets,
its queues, and the memory through which workers on a CPU add up what they computed.
"""

from __future__ import annotations

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
_PYTHONS = re.compile(r"/dev/shm/(psm_\w+)")
"""In a list of mappings: segments that Python made."""


class Scratch:
    """Of one engine. It is removed by :meth:`remove`, or where nobody calls that, with this object or the process.

    Args:
        shared: the engine computes in this process, whose engines share a process group: it reads the file of the first
            until the last is closed.
    """

    def __init__(self, shared: bool) -> None:
        self.shared = shared
        self.folder = Path(tempfile.mkdtemp(prefix="rlhf-vllm-", dir=os.environ.get(SOCKETS)))
        self.meeting = f"vllm_dist_{uuid4().hex}"
        """Name of the workers' file; what they share on a CPU is called after it."""
        self._segments: list[str] = []
        self._buffers: list[weakref.ref[Any]] = []
        """Those of the segments that vLLM would remove in this process too."""
        self.remove = weakref.finalize(
            self, _remove, os.getpid(), self.folder, self.meeting, self._segments, self._buffers
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


def _mapped(process: int) -> set[str]:
    try:
        return set(_PYTHONS.findall(Path(f"/proc/{process}/maps").read_text()))
    except OSError:  # it has ended, or the system has no such list
        return set()


def _remove(process: int, folder: Path, meeting: str, segments: list[str], buffers: list[weakref.ref[Any]]) -> None:
    if os.getpid() != process:  # a worker that was forked from this process
        return
    for buffer in buffers:
        if (alive := buffer()) is not None:
            alive.is_creator = False  # it would not find its segment
    for name in segments:
        try:
            segment = SharedMemory(name)
        except FileNotFoundError:  # whoever made it has removed it
            continue
        segment.unlink()
        segment.close()
    for path in SHARED_MEMORY.glob(f"{meeting}*"):
        path.unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)
