"""Worker processes of engines from one fork server, which imports vLLM once for all of them.

For tests that end many workers: each would else import for seconds what the last one did. Everything but the imports is
as vLLM does it; tests of the start itself leave vLLM's own way in place.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Mapping
from multiprocessing import forkserver, popen_forkserver
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerContext, ForkServerProcess
from threading import Lock
from typing import Any

PRELOADED = ("vllm.v1.executor.multiproc_executor", "vllm.v1.worker.cpu_worker", "rlhf_plugin_vllm.worker.extension")


def inside(environment: Mapping[str, str], target: Callable[..., None], kwargs: Mapping[str, Any]) -> None:
    """The server has the environment of its own start."""
    os.environ.clear()
    os.environ.update(environment)
    target(**kwargs)


class OnceRead(popen_forkserver.Popen):
    """The server sends an exit code once. vLLM's thread and ours both ask for it: whoever came second would get 255."""

    def __init__(self, process: Any) -> None:
        self._reading = Lock()
        super().__init__(process)

    def poll(self, flag: int = os.WNOHANG) -> int | None:
        if flag != os.WNOHANG and self.returncode is None:
            wait([self.sentinel])
        with self._reading:
            return super().poll(os.WNOHANG)


class Worker(ForkServerProcess):
    _Popen = staticmethod(OnceRead)

    def __init__(self, target: Callable[..., None], kwargs: Mapping[str, Any], **others: Any) -> None:
        super().__init__(target=inside, args=(dict(os.environ), target, dict(kwargs)), **others)


class Forking(ForkServerContext):
    """In the place of vLLM's context of processes."""

    Process = Worker


def context() -> Forking:
    return Forking()


def start() -> None:
    """The server, which ends with this process. Its socket is in the folder for temporary files as it is now."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(list(PRELOADED))
    forkserver.ensure_running()
