"""What a process of torchrun does that is not the driver: it starts workers on its machine, as the driver asks."""

from __future__ import annotations

import pickle
import signal
import socket
import threading
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from rlhf.errors import WorkerError

from rlhf_plugin_processes.channel import ANSWER, END, FAILED, Channel, Message
from rlhf_plugin_processes.shared_values import SharedValue
from rlhf_plugin_processes.supervised import Supervised
from rlhf_plugin_processes.this_machine import ThisMachine
from rlhf_plugin_processes.torchrun.environment import VARIABLES, Member
from rlhf_plugin_processes.torchrun.meeting import DriverAddress


def member_name(rank: int) -> str:
    return f"process {rank} of torchrun"


def serve(member: Member, cpus: int | None) -> None:
    """Serve the driver until its run has ended. Raises WorkerError if the driver was lost."""
    server = MachineServer(DriverAddress(member), cpus)
    for stop in (
        signal.SIGINT,
        signal.SIGTERM,
    ):  # the driver gets it too, saves and ends the run
        signal.signal(stop, signal.SIG_IGN)
    server.serve(member)


class MachineServer:
    """Answers the driver's calls, each in a thread of its own. Workers end when this process ends."""

    def __init__(self, driver: DriverAddress, cpus: int | None) -> None:
        self._driver = driver
        self._here = ThisMachine(cpus, without=VARIABLES)
        self._started: dict[int, Supervised] = {}

    def serve(self, member: Member) -> None:
        facts = {"machine": member.machine, "local_rank": member.local_rank, "host": socket.gethostname()}
        facts |= {"gpus": self._here.gpus, "resources": self._here.node.resources}
        self._channel = Channel(self._driver.connect(member_name(member.rank), facts))
        while (message := self._channel.receive()) is not None and message.kind != END:
            threading.Thread(target=self._answer, args=(message,), name="call", daemon=True).start()
        for process in list(self._started.values()):
            process.kill()
        self._here.close()
        if message is None:
            raise WorkerError(
                f"the driver of the run ({member.driver}) was lost: its process ended, or the network broke. The "
                "workers of this machine were ended. The output of rank 0 says more."
            )

    def _answer(self, message: Message) -> None:
        try:
            method, arguments = message.value.value()
            kind, value = ANSWER, getattr(self, method)(*arguments)
        except Exception as error:
            kind, value = FAILED, (f"{type(error).__name__}: {error}", traceback.format_exc())
        with suppress(OSError):  # the driver has ended, and this process does too
            self._channel.send(Message(message.call, kind, SharedValue.of(value)))

    # ------------------------------------------------------------------------------------- calls

    def start(
        self,
        number: int,
        name: str,
        env: Mapping[str, str],
        devices: Sequence[str] | None,
        logs: str | None,
        show: bool,
    ) -> str:
        """Start a worker, connected to the driver as ``worker NUMBER``. Returns the path of its output."""
        with self._driver.connect(worker_name(number), {}) as end:
            folder = None if logs is None else Path(logs)
            self._started[number], path = self._here.start_with(end, name, env, devices, folder, show)
        return path

    def wait(self, number: int) -> str:
        return self._started[number].wait()

    def kill(self, number: int) -> None:
        self._started[number].kill()

    def beside(self, function: bytes, arguments: tuple[Any, ...]) -> str:
        answer: str = pickle.loads(function)(*arguments)
        return answer


def worker_name(number: int) -> str:
    return f"worker {number}"
