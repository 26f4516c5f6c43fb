"""The launcher ``torchrun``: ranks and engines on every machine on which torchrun started a process."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, ClassVar

from rlhf_workers.driver.handle import WorkerHandle
from rlhf_workers.driver.version_check import check_versions

from rlhf_plugin_processes.launcher import ProcessesLauncher
from rlhf_plugin_processes.machine import Machine
from rlhf_plugin_processes.this_machine import ThisMachine
from rlhf_plugin_processes.torchrun.environment import VARIABLES, Member, member
from rlhf_plugin_processes.torchrun.meeting import Meeting
from rlhf_plugin_processes.torchrun.other_machine import OtherMachine
from rlhf_plugin_processes.torchrun.server import member_name, serve


class TorchrunLauncher(ProcessesLauncher):
    """Rank 0 of torchrun is the driver of the run. On every other machine one process of torchrun starts the workers
    that the driver places there. Further processes of torchrun wait for the end of the run."""

    name = "torchrun"
    machines_are: ClassVar[str] = "the machines of torchrun"

    def __init__(self, config: Any = None) -> None:
        super().__init__(config)
        self._member: Member | None = None
        self._closing = ExitStack()

    @classmethod
    def join(cls, config: Any) -> None:
        if (own := member(os.environ)).rank:
            serve(own, config.cpus)
            raise SystemExit(0)

    @classmethod
    def here(cls, config: Any) -> bool:
        return os.environ.get("GROUP_WORLD_SIZE", "1") == "1"

    @classmethod
    def _check_environment(cls) -> None:
        """A run can be checked, but not placed, without torchrun."""

    def _find_machines(self) -> list[Machine]:
        self._member = own = member(os.environ)
        here = ThisMachine(self.config.cpus, without=VARIABLES)
        here.node = replace(here.node, id=str(own.machine))
        machines: list[Machine] = [here]
        if own.size > 1:
            machines += self._others(own, here)
        return machines

    def _others(self, own: Member, here: ThisMachine) -> list[Machine]:
        """One process of each other machine. All processes of torchrun must have connected."""
        meeting = Meeting(own)
        self._closing.callback(meeting.close)
        machines: dict[int, Machine] = {}
        for rank in range(1, own.size):
            end, facts = meeting.take(member_name(rank), self.config.start_timeout)
            other = OtherMachine(end, facts, self._calls, meeting, self.config.start_timeout)
            self._closing.callback(other.close)
            if facts["machine"] != own.machine:
                machines.setdefault(facts["machine"], other)
                here.address = self._calls.host = facts["driver"]
        return [machines[number] for number in sorted(machines)]

    def shutdown(self) -> None:
        with ExitStack() as last_first:
            last_first.enter_context(self._closing)
            last_first.callback(super().shutdown)

    def _threads(self) -> str:
        # for several processes on a machine torchrun sets it to 1 by itself
        return super()._threads() if self._member is not None and self._member.local_size == 1 else ""

    def _check_described(self, members: Sequence[WorkerHandle]) -> None:
        check_versions([m.facts for m in members])
