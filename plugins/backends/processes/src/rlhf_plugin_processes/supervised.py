"""One worker process of this machine."""

from __future__ import annotations

import signal
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from rlhf.children import Child

from rlhf_plugin_processes.machine import Started
from rlhf_plugin_processes.shared_values import Descriptor

_FOLDER = Path(__file__).parent
_END_SECONDS = 30.0
"""Time for the end of a worker and all its descendants."""


class Supervised(Started):
    """The worker ends when this process ends (:mod:`rlhf.children`)."""

    def __init__(
        self, end: socket.socket, env: Mapping[str, str], devices: Sequence[str] | None, log: Descriptor
    ) -> None:
        """
        Args:
            end: the worker's end of its channel to the driver.
            env: all environment variables.
            devices: ids of the visible GPUs; None where there are no GPUs.
            log: where the output of the worker goes. It is kept open, because the message about the worker's death ends
                with it.
        """
        self._log = log
        number = end.fileno()
        worker = [sys.executable, "-P", str(_FOLDER / "worker_program.py"), str(number)]
        if devices is not None:
            env = {**env, "CUDA_VISIBLE_DEVICES": ",".join(devices)}
        self._child = Child(worker, stdout=log.number, stderr=log.number, pass_fds=[number], env=env)

    def wait(self) -> str:
        return _exit_cause(self._child.wait())

    def kill(self) -> None:
        self._child.end()
        self._child.ends_within(_END_SECONDS)  # a process may wait in the kernel for longer

    def beside(self, function: Callable[..., str], *arguments: Any) -> str:
        return function(*arguments)


def _exit_cause(status: int) -> str:
    """``status``: as :attr:`subprocess.Popen.returncode` has it."""
    if status == -signal.SIGKILL:
        return "its process was killed by SIGKILL: by somebody, or by the kernel when memory ran out (`dmesg` shows it)"
    if status < 0:
        with suppress(ValueError):
            return f"its process was ended by {signal.Signals(-status).name}"
    return f"its process ended with exit code {status}"
