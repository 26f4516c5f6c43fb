"""The launcher ``processes``: ranks and engines are processes of this machine, started by the run itself."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, ClassVar

import cloudpickle
from rlhf.errors import WorkerError
from rlhf.interfaces import Generator, Place
from rlhf.plugins import Resolved
from rlhf_workers.driver.handle import WorkerHandle
from rlhf_workers.launcher import Placed, WorkerLauncher, divide_plugins
from rlhf_workers.placement import Allocation, allocate, assign, bundles_of, check_fits, device_kind

from rlhf_plugin_processes.child import Child
from rlhf_plugin_processes.config import ProcessesConfig
from rlhf_plugin_processes.devices import gpus_of
from rlhf_plugin_processes.machine import Machine
from rlhf_plugin_processes.references import ProcessCalls
from rlhf_plugin_processes.refusals import refuse_other_systems, refuse_torchrun
from rlhf_plugin_processes.this_machine import ThisMachine

LOGS = "workers"
"""Folder for the output of workers, in the folder of reports."""


class ProcessesLauncher(WorkerLauncher):
    """Starts one process per rank and per engine. Nothing is reserved: another run on this machine does not know of it.

    Each process ends, with all its descendants, when this process ends in any way (:mod:`rlhf.children`).
    """

    name = "processes"
    capabilities: ClassVar[frozenset[str]] = frozenset({"processes", "ranks:many", "answers"})
    Config = ProcessesConfig
    machines_are: ClassVar[str] = "this machine"
    """What the machines are, for a message."""

    def __init__(self, config: ProcessesConfig | None = None) -> None:
        super().__init__(config)
        self._calls = ProcessCalls()
        self._machines: dict[str, Machine] = {}
        """By node id."""
        self._bundles: list[int] = []
        """Number of devices of each bundle."""
        self._plugins: tuple[bytes, list[dict[str, str]]] = b"", []
        self._logs: Path | None = None

    @classmethod
    def check(cls, config: Any, places: Mapping[str, Place], generator: type[Generator] | None, transport: str) -> None:
        super().check(config, places, generator, transport)
        refuse_other_systems(cls.name)
        cls._check_environment()

    @classmethod
    def _check_environment(cls) -> None:
        refuse_torchrun(os.environ)

    def _find_machines(self) -> list[Machine]:
        """The machines of the run, this one first."""
        return [ThisMachine(self.config.cpus)]

    def place(self, places: Mapping[str, Place], plugins: Sequence[Resolved] = (), reports: Path | None = None) -> None:
        self._begin_placing(reports)
        refuse_other_systems(self.name)
        self._check_environment()
        with self._or_nothing():
            self._machines = {machine.node.id: machine for machine in self._find_machines()}
            available = [machine.node for machine in self._machines.values()]
            check_fits(places, available, label=self.machines_are)
            kind = device_kind(available)
            bundles = bundles_of(places, kind)
            nodes = assign(bundles, available)
            self._bundles = [b.devices for b in bundles]
            self._logs = self._reports / LOGS if self.config.reports is not None or reports is not None else None
            self._placed = Placed(self._calls, allocate(places, bundles, nodes), nodes, kind == "GPU")
            files, manifest = divide_plugins(plugins)
            self._plugins = cloudpickle.dumps(files), manifest

    def shutdown(self) -> None:
        with ExitStack() as last_first:
            for machine in self._machines.values():
                last_first.callback(machine.close)
            self._end_workers(last_first)

    # --------------------------------------------------------------------------------------- parts

    def _start(self, allocations: Mapping[str, Allocation]) -> list[WorkerHandle]:
        nodes = self._reserved().nodes
        members, paths = list[WorkerHandle](), list[str]()
        for name, allocation in allocations.items():
            env = {"OMP_NUM_THREADS": self._threads() or str(allocation.threads), **self.config.env}
            machine = self._machines[nodes[allocation.bundle]]
            devices = gpus_of(allocation, self._bundles, nodes, machine.gpus)
            process, end, path = machine.start(name, env, devices, self._logs, self.config.show_output)
            paths.append(path)
            members.append(Child(name, self._calls, process, end, env, devices, machine.address))
            members[-1].facts = {"stderr": path}  # a start that fails is explained there
            self._running.append(members[-1])
        described = [m.ask("describe", *self._plugins) for m in members]
        for member, path, facts in zip(members, paths, self._answers(members, described), strict=True):
            member.facts = facts | {"stderr": path}
        self._check_described(members)
        return members

    def _threads(self) -> str:
        """OMP_NUM_THREADS as the user set it for this process; empty if it is not set."""
        return os.environ.get("OMP_NUM_THREADS", "")

    def _check_described(self, members: Sequence[WorkerHandle]) -> None:
        """Raises an error if a worker cannot resolve the run's plugins."""
        for member in members:
            if (problem := member.facts["problem"]) is not None:
                raise problem.error(member.name, "describe", WorkerError)
