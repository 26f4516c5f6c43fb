"""Another machine of the run as the driver sees it."""

from __future__ import annotations

import pickle
import socket
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

from rlhf.errors import WorkerError
from rlhf_workers.driver.calls import CallFailed
from rlhf_workers.placement import Node

from rlhf_plugin_processes.channel import ASK, END
from rlhf_plugin_processes.connection import Connection
from rlhf_plugin_processes.machine import Machine, Started
from rlhf_plugin_processes.references import ProcessCalls
from rlhf_plugin_processes.torchrun.meeting import Meeting
from rlhf_plugin_processes.torchrun.server import worker_name

_ASK_SECONDS = 60.0
"""For what a process of another machine does beside a worker."""


class OtherMachine(Machine):
    """Starts workers through the process that torchrun started there (:mod:`.server`)."""

    _numbers = count()
    """Of workers of all machines."""

    def __init__(
        self,
        end: socket.socket,
        facts: Mapping[str, Any],
        calls: ProcessCalls,
        meeting: Meeting,
        timeout: float,
    ) -> None:
        """
        Args:
            end, facts: what :meth:`Meeting.take` returned.
            timeout: seconds for a worker to connect.
        """
        self.address, self.gpus = facts["address"], facts["gpus"]
        self.node = Node(str(facts["machine"]), facts["address"], facts["resources"])
        self.name = f"machine {facts['host']} ({self.address})"
        self._calls, self._meeting, self._timeout = calls, meeting, timeout
        lost = f"{self.name} was lost: its process of torchrun ended, or the network broke"
        self._connection = Connection(self.name, end, calls, lambda: lost)

    def start(
        self, name: str, env: Mapping[str, str], devices: Sequence[str] | None, logs: Path | None, show: bool
    ) -> tuple[Started, socket.socket, str]:
        number = next(self._numbers)
        folder = None if logs is None else str(logs.absolute())
        try:
            path: str = self.ask("start", number, name, dict(env), devices, folder, show)
        except CallFailed as cause:
            reason = str(cause) if cause.died else f"{self.name} cannot start it: {cause}"
            raise WorkerError(f"{name} was not started: {reason}") from None
        end, _ = self._meeting.take(worker_name(number), self._timeout)
        return OnOtherMachine(self, number), end, path

    def ask(self, method: str, *arguments: Any, timeout: float | None = None) -> Any:
        """Call a method of :class:`~.server.MachineServer`. Raises CallFailed, or TimeoutError."""
        reference = self._connection.ask(ASK, method, arguments)
        if not self._calls.wait([reference], timeout=timeout)[0]:
            raise TimeoutError(f"{self.name} gives no answer within {timeout:g} s")
        return self._calls.get(reference)

    def close(self) -> None:
        """The process of torchrun there ends, with exit code 0."""
        self._connection.tell(END)


class OnOtherMachine(Started):
    """A worker on another machine."""

    def __init__(self, machine: OtherMachine, number: int) -> None:
        self._machine, self._number = machine, number

    def wait(self) -> str:
        try:
            ending: str = self._machine.ask("wait", self._number)
        except CallFailed as lost:
            return str(lost)
        return ending

    def kill(self) -> None:
        try:
            self._machine.ask("kill", self._number, timeout=_ASK_SECONDS)
        except (CallFailed, TimeoutError):  # a lost machine ends its workers itself
            return

    def beside(self, function: Callable[..., str], *arguments: Any) -> str:
        try:
            answer: str = self._machine.ask("beside", pickle.dumps(function), arguments, timeout=_ASK_SECONDS)
        except (CallFailed, TimeoutError) as cause:
            return f"({cause})"
        return answer
