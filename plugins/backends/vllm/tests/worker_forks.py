"""Worker processes of engines, and servers, from one fork server, which imports vLLM once for all of them.

For tests that start many workers: without it each worker would import vLLM for seconds, and a server three times. All
other steps are vLLM's own. Tests of the start itself do not use this module.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable, Mapping
from multiprocessing import forkserver, popen_forkserver
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from threading import Lock
from typing import Any

import pytest

PRELOADED = (
    "vllm.v1.executor.multiproc_executor", "vllm.v1.worker.cpu_worker", "vllm.entrypoints.launchers.api_server.entry",
    "rlhf_plugin_vllm.worker.extension",
)  # fmt: skip


def start_worker(environment: Mapping[str, str], target: Callable[..., None], kwargs: Mapping[str, Any]) -> None:
    """Set the environment in the worker: the fork server still has the one from its own start."""
    os.environ.clear()
    os.environ.update(environment)
    target(**kwargs)


class OnceRead(popen_forkserver.Popen):
    """The server sends an exit code once. vLLM's thread and the plugin's both ask for it: the second would get 255."""

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

    def __init__(self, target: Callable[..., None], kwargs: Mapping[str, Any], **options: Any) -> None:
        super().__init__(target=start_worker, args=(dict(os.environ), target, dict(kwargs)), **options)


class Forking(ForkServerContext):
    """Replaces vLLM's multiprocessing context."""

    Process = Worker


def context() -> Forking:
    return Forking()


def start() -> None:
    """Start the server. It ends with this process. Its socket is in the current folder for temporary files. As in the
    plugin's own engines, vLLM does not compile small helper functions, which takes each worker many seconds."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(list(PRELOADED))
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("TORCHDYNAMO_DISABLE", "1")
        forkserver.ensure_running()


def serve(words: list[str], log: Path) -> None:
    """``vllm serve`` with these flags, as a target of :class:`Worker`. Its engine and worker are forks of it."""
    from vllm.entrypoints.launchers.api_server.entry import main
    from vllm.v1.engine import utils
    from vllm.v1.executor import multiproc_executor

    for module in (utils, multiproc_executor):
        vars(module)["get_mp_context"] = lambda: multiprocessing.get_context("fork")
    with log.open("w") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    sys.argv = ["vllm", *words]
    main()
