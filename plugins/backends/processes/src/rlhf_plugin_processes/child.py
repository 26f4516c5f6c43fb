"""One worker process as the driver calls it."""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from rlhf_workers.driver.handle import WorkerHandle

from rlhf_plugin_processes.channel import ASK, BESIDE
from rlhf_plugin_processes.connection import Connection
from rlhf_plugin_processes.machine import Started
from rlhf_plugin_processes.references import ProcessCalls, Reference, Stream


class Child(WorkerHandle):
    """A worker of this machine, or of another."""

    def __init__(
        self,
        name: str,
        calls: ProcessCalls,
        process: Started,
        end: socket.socket,
        env: Mapping[str, str],
        devices: Sequence[str] | None,
        address: str,
    ) -> None:
        """
        Args:
            end: the driver's end of the channel.
            env: environment variables beside those of the driver.
            devices: ids of the visible GPUs; None where there are no GPUs.
            address: of the worker's machine.
        """
        super().__init__(name)
        self._process = process
        path = [os.path.abspath(p) for p in sys.path]
        start = {"name": name, "env": dict(env), "devices": devices, "address": address, "path": path}
        with suppress(OSError):  # it is dead already, which the reading thread reports
            end.sendall(json.dumps(start).encode() + b"\n")
        self._connection = Connection(name, end, calls, process.wait)

    def ask(self, method: str, *arguments: Any) -> Reference:
        return self._connection.ask(ASK, method, arguments)

    def items(self, method: str, *arguments: Any, ahead: int | None = None) -> Stream:
        return self._connection.items(method, arguments, ahead)

    def beside(self, method: str) -> Reference:
        return self._connection.ask(BESIDE, method, ())

    def on_its_node(self, function: Callable[..., str], *arguments: Any) -> str:
        return self._process.beside(function, *arguments)

    def kill(self) -> None:
        """Returns when the process and all its descendants are gone."""
        self._process.kill()
