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
from rlhf_workers.placement import Allocation, allocate, bundles_of, check_fits, device_kind

from rlhf_plugin_processes.child import Child
from rlhf_plugin_processes.config import ProcessesConfig
from rlhf_plugin_processes.devices import gpus_of, this_machine, visible_gpus
from rlhf_plugin_processes.output import OutputPrinter, open_log
from rlhf_plugin_processes.references import ProcessCalls
from rlhf_plugin_processes.refusals import refuse_other_systems, refuse_torchrun

LOGS = "workers"
"""Folder for the output of workers, in the folder of reports."""


class ProcessesLauncher(WorkerLauncher):
    """Starts one process per rank and per engine. Nothing is reserved: another run on this machine does not know of it.

    Each process has a supervisor, which ends it with all its descendants when this process ends in any way.
    """

    name = "processes"
    capabilities: ClassVar[frozenset[str]] = frozenset({"processes", "ranks:many", "answers"})
    Config = ProcessesConfig

    def __init__(self, config: ProcessesConfig | None = None) -> None:
        super().__init__(config)
        self._calls = ProcessCalls()
        self._gpus: list[str] = []
        self._bundles: list[int] = []
        """Number of devices of each bundle."""
        self._plugins: tuple[bytes, list[dict[str, str]]] = b"", []
        self._logs: Path | None = None
        self._printer = OutputPrinter() if self.config.show_output else None

    @classmethod
    def check(cls, config: Any, places: Mapping[str, Place], generator: type[Generator] | None, transport: str) -> None:
        super().check(config, places, generator, transport)
        refuse_other_systems()
        refuse_torchrun(os.environ)

    def place(self, places: Mapping[str, Place], plugins: Sequence[Resolved] = (), reports: Path | None = None) -> None:
        self._begin_placing(reports)
        refuse_other_systems()
        refuse_torchrun(os.environ)
        gpus = visible_gpus()
        node = this_machine(self.config.cpus, gpus)
        check_fits(places, [node], there="this machine")
        kind = device_kind([node])
        bundles = bundles_of(places, kind)
        nodes = [node.id] * len(bundles)
        self._gpus, self._bundles = gpus, [b.devices for b in bundles]
        self._logs = self._reports / LOGS if self.config.reports is not None or reports is not None else None
        self._placed = Placed(self._calls, allocate(places, bundles, nodes), nodes, kind == "GPU")
        files, manifest = divide_plugins(plugins)
        self._plugins = cloudpickle.dumps(files), manifest

    def shutdown(self) -> None:
        with ExitStack() as last_first:
            if self._printer is not None:
                last_first.callback(self._printer.close)
            self._end_workers(last_first)

    # --------------------------------------------------------------------------------------- parts

    def _start(self, allocations: Mapping[str, Allocation]) -> list[WorkerHandle]:
        members, paths = list[WorkerHandle](), list[str]()
        for name, allocation in allocations.items():
            threads = os.environ.get("OMP_NUM_THREADS") or str(allocation.threads)
            env = {"OMP_NUM_THREADS": threads, **self.config.env}
            devices = gpus_of(allocation, self._bundles, self._gpus)
            log, path = open_log(self._logs, name)
            paths.append(path)
            if self._printer is not None:
                self._printer.add(name, path)
            members.append(Child(name, self._calls, env, devices, log))
            members[-1].facts = {"stderr": path}  # a start that fails is explained there
            self._running.append(members[-1])
        described = [m.ask("describe", *self._plugins) for m in members]
        for member, path, facts in zip(members, paths, self._answers(members, described), strict=True):
            member.facts = facts | {"stderr": path}
            if facts["problem"] is not None:
                raise facts["problem"].error(member.name, "describe", WorkerError)
        return members
