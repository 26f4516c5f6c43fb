"""A machine of a run, and a worker process that was started on it."""

from __future__ import annotations

import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlhf_workers.placement import Node


class Started(ABC):
    """A worker process. Any thread may call its methods."""

    @abstractmethod
    def wait(self) -> str:
        """Wait until the process has ended. Returns why it ended."""

    @abstractmethod
    def kill(self) -> None:
        """Returns when the process and all its descendants are gone."""

    @abstractmethod
    def beside(self, function: Callable[..., str], *arguments: Any) -> str:
        """Run ``function`` in another process of the worker's machine, or here if this is that machine. Returns its
        text; if it cannot run, why not."""


class Machine(ABC):
    """Where workers can be started."""

    node: Node
    gpus: Sequence[str]
    """Ids of its GPUs that the run may use."""
    address: str
    """The address at which workers of all machines reach those of this machine."""

    @abstractmethod
    def start(
        self, name: str, env: Mapping[str, str], devices: Sequence[str] | None, logs: Path | None, show: bool
    ) -> tuple[Started, socket.socket, str]:
        """Start a worker.

        Args:
            env: environment variables beside those of the machine's process.
            devices: ids of the visible GPUs; None where there are no GPUs.
            logs: folder for the output of the worker; None: the output has no name in any folder.
            show: also print the output.

        Returns the process, the driver's end of its channel, and the path of its output on that machine.
        """

    @abstractmethod
    def close(self) -> None:
        """Called after the last worker has ended."""
