"""Common parts of launchers with worker processes: roles and engines on placed devices, and their release."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cloudpickle
from rlhf.errors import CapabilityError, ConfigError, WorkerError
from rlhf.interfaces import GENERATOR, Generator, GeneratorSpec, Launcher, ModelSpec, Place, Trainer, WorkerGroup
from rlhf.paths import require_possible
from rlhf.plugins import Resolved
from rlhf.plugins.resolved import FILE

from rlhf_workers.driver.calls import Calls
from rlhf_workers.driver.failures import FailedCall, first_failure, result_of
from rlhf_workers.driver.handle import WorkerHandle
from rlhf_workers.driver.rank_group import RankGroup
from rlhf_workers.driver.stall_report import StallReport
from rlhf_workers.driver.watchdog import OnStall, Watchdog, ignore_stall
from rlhf_workers.engines.front import EngineGroup, check_takes_tensors
from rlhf_workers.engines.pool import EngineWorkers
from rlhf_workers.engines.weight_link import NO_LINKS, WeightLink, choose_kind
from rlhf_workers.launcher_options import WorkerOptions
from rlhf_workers.links.receiving import ReceivesOverLinks
from rlhf_workers.placement import Allocation
from rlhf_workers.process.payload import pack

if TYPE_CHECKING:
    from rlhf_workers.links.link import Kind

POLICY = "policy"
"""The role whose weights the engines sample from."""


@dataclass(frozen=True)
class ReservedDevices:
    """The reserved devices of a run."""

    calls: Calls
    allocations: Mapping[str, Sequence[Allocation]]
    """By role, in rank order."""
    nodes: Sequence[str]
    """The node of each bundle."""
    cuda: bool
    """Whether the devices are GPUs."""


class WorkerLauncher(Launcher):
    """Base of launchers. A subclass defines how devices are reserved (``place``) and how processes start
    (:meth:`_start`). This class creates roles and engines from the processes. If a launch fails, everything is
    released."""

    Config = WorkerOptions

    def __init__(self, config: Any = None) -> None:
        super().__init__(config)
        self._reserved_devices: ReservedDevices | None = None
        self._reports = Path.cwd()
        """Folder for reports about stalls."""
        self._plugins: tuple[bytes, list[dict[str, str]]] = b"", []
        """Plugins from files, which are sent as text, and the manifest of the installed plugins."""
        self._link: Kind | None = None
        """Kind of the link between the policy and the engines; None: weights go through the store."""
        self._running: list[WorkerHandle] = []
        """All started workers, including those of a failed start."""
        self._launched: list[RankGroup | EngineGroup] = []

    # ------------------------------------------------------------------ defined by each launcher

    @abstractmethod
    def _start(self, allocations: Mapping[str, Allocation]) -> list[WorkerHandle]:
        """Start processes, by name, that have resolved the run's plugins but hold no component yet."""

    def _check_reachable(self) -> None:
        """Called about once a second during waits. Raises WorkerError when workers cannot be reached any more."""

    # -------------------------------------------------------------------------------------- checks

    @classmethod
    def check(cls, config: Any, places: Mapping[str, Place], generator: type[Generator] | None, transport: str) -> None:
        if config is not None and config.reports is not None:
            require_possible(Path(config.reports), "launcher.reports")
        if generator is not None:
            check_takes_tensors(generator, cls.name)
            if transport in ("shared", "broadcast") and not issubclass(generator, ReceivesOverLinks):
                raise ConfigError(f"sync.transport = {transport!r} is not possible: {NO_LINKS}. Remove it.")

    def _begin_placing(self, plugins: Sequence[Resolved], reports: Path | None) -> None:
        """Refuse a second :meth:`place`. Choose the folder of reports, and pack the plugins for the workers."""
        if self._reserved_devices is not None:
            raise CapabilityError(f"launcher {self.name!r} has already placed a run; create another launcher")
        self._reports = Path(self.config.reports) if self.config.reports is not None else reports or Path.cwd()
        # Only installed plugins have a version that every node can be compared with.
        installed = [p for p in plugins if p.distribution != FILE and p.version]
        files = [p for p in plugins if p not in installed]
        self._plugins = cloudpickle.dumps(files), [p.manifest() for p in installed]

    # -------------------------------------------------------------------------------------- launch

    def launch_trainer(self, trainer: type[Trainer], config: Any, spec: ModelSpec) -> RankGroup:
        role, allocations = spec.role.name, self._reserved(spec.role.name).allocations[spec.role.name]
        if spec.world_size != len(allocations):
            raise CapabilityError(
                f"role {role!r} was placed with {len(allocations)} ranks and launched with {spec.world_size}; the two "
                "must be equal"
            )
        with self._or_nothing():
            members = self._start({f"{role} rank {rank}": allocation for rank, allocation in enumerate(allocations)})
            if len(members) > 1:
                # The ranks meet at an address of the node on which rank 0 runs.
                [meeting] = self._answers(members[:1], [members[0].ask("rendezvous")])
                spec = replace(spec, rendezvous=meeting)
            self._build(members, [(trainer, config, replace(spec, rank=rank)) for rank in range(len(members))])
        group = RankGroup(role, members, self._reserved().calls, self._watch)
        self._launched.append(group)
        return group

    def launch_generator(
        self,
        generator: type[Generator],
        config: Any,
        spec: GeneratorSpec,
        policy: WorkerGroup | None = None,
        refresh: Callable[[], object] | None = None,
    ) -> EngineGroup:
        check_takes_tensors(generator, self.name)
        devices = self._reserved(GENERATOR)
        allocations = devices.allocations[GENERATOR]

        def start(numbers: Sequence[int]) -> list[WorkerHandle]:
            count = len(self._running)
            try:
                members = self._start({f"engine {n}": allocations[n] for n in numbers})
                self._build(members, [(generator, config, spec)] * len(members))
            except BaseException:  # another attempt may follow on the same devices
                for member in self._running[count:]:
                    member.kill()
                raise
            return members

        link = None
        if self._link is not None:
            assert isinstance(policy, RankGroup)
            link = WeightLink(self._link, policy, devices.cuda, spec.sync_timeout, self._watch)
        broken = link.drop if link is not None else lambda: None
        with self._or_nothing():
            pool = EngineWorkers(devices.calls, start, self._watch, len(allocations), self.config.max_restarts, broken)
        front = EngineGroup(generator, spec, pool, link, refresh)
        self._launched.append(front)
        return front

    def choose_link(self, generator: type[Generator], transport: str) -> None:
        with self._or_nothing():  # refused before a model is loaded
            check_takes_tensors(generator, self.name)
            devices = self._reserved(POLICY, GENERATOR)
            allocations = devices.allocations[POLICY], devices.allocations[GENERATOR]
            links = issubclass(generator, ReceivesOverLinks)
            self._link = choose_kind(transport, links, *allocations, devices.cuda, devices.nodes)

    def _end_workers(self, last_first: ExitStack) -> None:
        """Register the shutdown of all workers, first groups and engines. Every callback runs, even if one raises."""
        # Callbacks run in reverse order: groups and engines are closed first, then every process is killed.
        for member in self._running:
            last_first.callback(member.kill)
        for group in self._launched:
            last_first.callback(group.close if isinstance(group, EngineGroup) else group.shutdown)
        self._launched, self._running, self._reserved_devices = [], [], None

    # --------------------------------------------------- starts, answers and monitoring of workers

    def _reserved(self, *roles: str) -> ReservedDevices:
        """The reserved devices. Raises CapabilityError if one of ``roles`` was not placed."""
        for role in roles:
            if self._reserved_devices is None or role not in self._reserved_devices.allocations:
                raise CapabilityError(f"{role!r} was not placed: call place() with it first")
        assert self._reserved_devices is not None
        return self._reserved_devices

    def _describe(self, members: Sequence[WorkerHandle]) -> None:
        """Have the workers resolve the run's plugins, and add what they report to each handle's facts."""
        described = [m.ask("describe", *self._plugins) for m in members]
        for member, facts in zip(members, self._answers(members, described), strict=True):
            member.facts = facts | member.facts

    def _build(self, members: Sequence[WorkerHandle], arguments: Sequence[tuple[Any, ...]]) -> None:
        payload = self._reserved().calls.send(pack(arguments))
        self._answers(members, [m.ask("build", payload, rank) for rank, m in enumerate(members)])

    def _answers(self, members: Sequence[WorkerHandle], refs: Sequence[Any]) -> list[Any]:
        """The answer of each worker, within ``start_timeout``. The first failure is raised at once."""
        calls = self._reserved().calls
        waiting, answers = dict(zip(refs, members, strict=True)), {}
        limit = self.config.start_timeout
        end = time.monotonic() + limit
        while waiting:
            ready, _ = calls.wait(list(waiting), timeout=max(0.0, end - time.monotonic()))
            if not ready:
                late = list(waiting.values())
                page = StallReport(calls, late[0], "start", limit, silent=False, waited_for=late).write(self._reports)
                names = ", ".join(m.name for m in late)
                raise WorkerError(
                    f"{names}: not ready within {limit:g} s (launcher.start_timeout). What each was doing: {page}"
                )
            for ref in ready:
                answers[ref] = result_of(calls, waiting.pop(ref), ref)
                if isinstance(answers[ref], FailedCall):
                    first, _ = first_failure(calls, answers[ref], waiting)
                    raise first.error("start", WorkerError)
        return [answers[ref] for ref in refs]

    def _watch(self, members: Sequence[WorkerHandle], doing: str, stalled: OnStall = ignore_stall) -> Watchdog:
        calls = self._reserved().calls
        return Watchdog(members, doing, calls, self.config, self._reports, self._check_reachable, stalled)

    @contextmanager
    def _or_nothing(self) -> Iterator[None]:
        """Shut everything down if the body fails."""
        try:
            yield
        except BaseException:
            self.shutdown()
            raise
