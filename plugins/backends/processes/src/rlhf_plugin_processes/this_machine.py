"""The machine of this process."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

from rlhf_plugin_processes.devices import node_here, visible_gpus
from rlhf_plugin_processes.machine import Machine
from rlhf_plugin_processes.output import OutputPrinter, open_log
from rlhf_plugin_processes.supervised import Supervised

LOOPBACK = "127.0.0.1"
"""Where all workers are on one machine, ranks meet on the loopback interface, which no other machine reaches."""


class ThisMachine(Machine):
    """Workers are started by this process, and end with it."""

    def __init__(self, cpus: int | None, without: Sequence[str] = ()) -> None:
        """
        Args:
            cpus: CPU cores that workers may be placed on; None: those that this process may use.
            without: names of environment variables that workers do not get.
        """
        self.gpus = visible_gpus()
        self.node = node_here(cpus, self.gpus)
        self.address = LOOPBACK
        self._without = frozenset(without)
        self._printer = OutputPrinter()

    def start(
        self, name: str, env: Mapping[str, str], devices: Sequence[str] | None, logs: Path | None, show: bool
    ) -> tuple[Supervised, socket.socket, str]:
        ours, theirs = socket.socketpair()
        with theirs:
            process, path = self.start_with(theirs, name, env, devices, logs, show)
        return process, ours, path

    def start_with(
        self,
        end: socket.socket,
        name: str,
        env: Mapping[str, str],
        devices: Sequence[str] | None,
        logs: Path | None,
        show: bool,
    ) -> tuple[Supervised, str]:
        """:meth:`start` with the worker's end of its channel. Returns the process and the path of its output."""
        log, path = open_log(logs, name)
        if show:
            self._printer.add(name, path)
        inherited = {key: value for key, value in os.environ.items() if key not in self._without}
        return Supervised(end, {**inherited, **env}, devices, log), path

    def close(self) -> None:
        self._printer.close()
