"""The launcher ``ray``: every rank and every engine is an actor of a Ray cluster."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import ray
from rlhf.errors import CapabilityError, ConfigError, WorkerError
from rlhf.interfaces import GENERATOR, Generator, GeneratorSpec, Launcher, ModelSpec, Place, Trainer, WorkerGroup
from rlhf.plugins import Plugins, Resolved
from rlhf.plugins.resolved import FILE
from rlhf_transport.receiving import receives_over_links

from rlhf_plugin_ray.actor.payload import pack, send
from rlhf_plugin_ray.actor.worker import Worker
from rlhf_plugin_ray.cluster.connection import Cluster
from rlhf_plugin_ray.cluster.placement import Allocation, check_fits, device_kind
from rlhf_plugin_ray.cluster.reservation import Reservation
from rlhf_plugin_ray.config import RayConfig
from rlhf_plugin_ray.engines.front import EngineGroup, check_takes_tensors
from rlhf_plugin_ray.engines.pool import EnginePool
from rlhf_plugin_ray.engines.weight_link import NO_LINKS, WeightLink, choose_kind
from rlhf_plugin_ray.trainer_group import RayGroup
from rlhf_plugin_ray.workers.failures import FailedCall, first_failure, result_of
from rlhf_plugin_ray.workers.handle import WorkerHandle, slug
from rlhf_plugin_ray.workers.stall_report import StallReport
from rlhf_plugin_ray.workers.version_check import check_versions
from rlhf_plugin_ray.workers.watchdog import OnStall, Watchdog, ignore_stall

if TYPE_CHECKING:
    from rlhf_transport.link import Kind

POLICY = "policy"
"""The role whose weights the engines sample from."""


class RayLauncher(Launcher):
    """Reserves one placement group for the run, and starts one actor process per rank and per engine.

    :meth:`place` refuses what cannot work before anything is loaded. When a launch fails, everything is released.
    """

    name = "ray"
    capabilities: ClassVar[frozenset[str]] = frozenset({"processes", "ranks:many", "nodes:many", "answers"})
    Config = RayConfig

    def __init__(self, config: RayConfig | None = None) -> None:
        super().__init__(config)
        self._reports = Path.cwd()
        """Folder for reports about stalls."""
        self._cluster: Cluster | None = None
        self._reservation: Reservation | None = None
        self._link: Kind | None = None
        """Kind of the link between the policy and the engines; None: weights go through the object store."""
        self._plugins: tuple[bytes, list[dict[str, str]]] = b"", []
        self._running: list[WorkerHandle] = []
        self._launched: list[RayGroup | EngineGroup] = []
        self._starts: Counter[str] = Counter()

    @classmethod
    def here(cls, config: Any) -> bool:
        """True for a Ray that the run starts; any other cluster may have other machines."""
        return config.address is None and not os.environ.get("RAY_ADDRESS") and not ray.is_initialized()

    @classmethod
    def check(cls, config: Any, places: Mapping[str, Place], generator: type[Generator] | None, transport: str) -> None:
        if generator is not None:
            check_takes_tensors(generator)
            if transport in ("shared", "broadcast") and not receives_over_links(generator):
                raise ConfigError(f"sync.transport = {transport!r} is not possible: {NO_LINKS}. Leave it out.")

    # ---------------------------------------------------------------------------------- placement

    def place(self, places: Mapping[str, Place], plugins: Sequence[Resolved] = (), reports: Path | None = None) -> None:
        if self._cluster is not None:
            raise CapabilityError("launcher 'ray' has placed a run already; make another launcher")
        self._reports = Path(self.config.reports) if self.config.reports is not None else reports or Path.cwd()
        installed = [p for p in plugins if p.distribution != FILE and p.version]
        with self._or_nothing():
            self._cluster = Cluster(self.config)
            nodes = self._cluster.nodes()
            check_fits(places, nodes, self.config.strategy)
            self._reservation = Reservation(places, device_kind(nodes), self.config)
            self._plugins = (
                ray.cloudpickle.dumps([p for p in plugins if p not in installed]),
                Plugins.manifest(installed),
            )

    # -------------------------------------------------------------------------------------- launch

    def launch_trainer(self, trainer: type[Trainer], config: Any, spec: ModelSpec) -> RayGroup:
        role, allocations = spec.role.name, self._reserved(spec.role.name).allocations[spec.role.name]
        if spec.world_size != len(allocations):
            raise CapabilityError(
                f"role {role!r} was placed with {len(allocations)} ranks and launched with {spec.world_size}; the two "
                "must be equal"
            )
        with self._or_nothing():
            members = self._start({f"{role} rank {rank}": allocation for rank, allocation in enumerate(allocations)})
            if len(members) > 1:
                [meeting] = self._answers(members[:1], [members[0].handle.rendezvous.remote()])
                spec = replace(spec, rendezvous=meeting)
            self._build(members, [(trainer, config, replace(spec, rank=rank)) for rank in range(len(members))])
        group = RayGroup(role, members, self._watch)
        self._launched.append(group)
        return group

    def launch_generator(
        self,
        generator: type[Generator],
        config: Any,
        spec: GeneratorSpec,
        policy: WorkerGroup | None = None,
        refresh: Callable[[], object] | None = None,
    ) -> Generator:
        check_takes_tensors(generator)
        allocations = self._reserved(GENERATOR).allocations[GENERATOR]

        def start(numbers: Sequence[int]) -> list[WorkerHandle]:
            before = len(self._running)
            try:
                members = self._start({f"engine {n}": allocations[n] for n in numbers})
                self._build(members, [(generator, config, spec)] * len(members))
            except BaseException:  # another attempt may follow on the same devices
                for member in self._running[before:]:
                    member.kill()
                raise
            return members

        link = None
        if self._link is not None:
            assert isinstance(policy, RayGroup)
            link = WeightLink(self._link, policy, self._reserved().cuda, spec.sync_timeout, self._watch)
        broken = link.drop if link is not None else lambda: None
        with self._or_nothing():
            pool = EnginePool(start, self._watch, len(allocations), self.config.max_restarts, broken)
        front = EngineGroup(generator, spec, pool, link, refresh)
        self._launched.append(front)
        return front

    def choose_link(self, generator: type[Generator], transport: str) -> None:
        with self._or_nothing():  # refused before a model is loaded
            check_takes_tensors(generator)
        links = receives_over_links(generator)
        with self._or_nothing():
            reserved = self._reserved(POLICY, GENERATOR)
            allocations = reserved.allocations[POLICY], reserved.allocations[GENERATOR]
            self._link = choose_kind(transport, links, *allocations, reserved.cuda, reserved.nodes)

    def shutdown(self) -> None:
        with ExitStack() as last_first:  # every callback runs, even if another one raises
            if self._cluster is not None:
                last_first.callback(self._cluster.close)
                if self._cluster.control.lost:  # every call below would wait for it; the workers end with Ray
                    self._launched, self._running, self._reservation = [], [], None
            if self._reservation is not None:
                last_first.callback(self._reservation.release)
            for member in self._running:  # includes the workers of a failed start
                last_first.callback(member.kill)
            for one in self._launched:
                last_first.callback(one.close if isinstance(one, EngineGroup) else one.shutdown)
            self._launched, self._running, self._reservation, self._cluster = [], [], None, None

    # --------------------------------------------------------------------------------------- parts

    def _reserved(self, *roles: str) -> Reservation:
        """The reservation; CapabilityError if one of ``roles`` was not placed."""
        for role in roles:
            if self._reservation is None or role not in self._reservation.allocations:
                raise CapabilityError(f"{role!r} was not placed: call place() with it first")
        assert self._reservation is not None
        return self._reservation

    def _start(self, allocations: Mapping[str, Allocation]) -> list[WorkerHandle]:
        """Start actors that have resolved the run's plugins. They hold no component yet."""
        members, reserved = [], self._reserved()
        for (name, allocation), gpus in zip(
            allocations.items(), reserved.visible(list(allocations.values())), strict=True
        ):
            env = {"OMP_NUM_THREADS": _threads() or str(allocation.threads), **self.config.env}
            remote = ray.remote(concurrency_groups={"watch": 1})  # type: ignore[call-overload]  # ray's types lack it
            actor = remote(Worker).options(
                num_cpus=allocation.cpus,
                num_gpus=0,
                max_restarts=0,
                scheduling_strategy=reserved.at(allocation.bundle),
                **self._named(name),
            )
            members.append(WorkerHandle(name, actor.remote(name, os.getcwd(), env, gpus)))
        self._running += members
        described = [m.handle.describe.remote(*self._plugins) for m in members]
        for member, facts in zip(members, self._answers(members, described), strict=True):
            member.facts = facts
        check_versions([m.facts for m in members])
        return members

    def _named(self, name: str) -> dict[str, str]:
        """With ``launcher.namespace`` workers have names in it: ``policy-0``, ``engine-0``, and ``engine-0.1`` for its
        first replacement."""
        if self.config.namespace is None:
            return {}
        starts, self._starts[name] = self._starts[name], self._starts[name] + 1
        return {"name": slug(name) + f".{starts}" * bool(starts), "namespace": self.config.namespace}

    def _build(self, members: Sequence[WorkerHandle], arguments: Sequence[tuple[Any, ...]]) -> None:
        payload = send(pack(arguments))
        self._answers(members, [m.handle.build.remote(payload, rank) for rank, m in enumerate(members)])

    def _answers(self, members: Sequence[WorkerHandle], refs: Sequence[Any]) -> list[Any]:
        """The answer of each worker, within ``start_timeout``. The first failure is raised at once."""
        waiting, answers = dict(zip(refs, members, strict=True)), {}
        limit = self.config.start_timeout
        end = time.monotonic() + limit
        while waiting:
            ready, _ = ray.wait(list(waiting), timeout=max(0.0, end - time.monotonic()), fetch_local=False)
            if not ready:
                late = list(waiting.values())
                page = StallReport(late[0], "start", limit, silent=False, waited_for=late).write(self._reports)
                names = ", ".join(m.name for m in late)
                raise WorkerError(
                    f"{names}: not ready within {limit:g} s (launcher.start_timeout). What each was doing: {page}"
                )
            for ref in ready:
                answers[ref] = result_of(waiting.pop(ref), ref)
                if isinstance(answers[ref], FailedCall):
                    first, _ = first_failure(answers[ref], waiting)
                    raise first.error("start", WorkerError)
        return [answers[ref] for ref in refs]

    def _watch(self, members: Sequence[WorkerHandle], doing: str, stalled: OnStall = ignore_stall) -> Watchdog:
        assert self._cluster is not None
        return Watchdog(members, doing, self.config, self._reports, self._cluster.control.check, stalled)

    @contextmanager
    def _or_nothing(self) -> Iterator[None]:
        """Shut everything down if the body fails."""
        try:
            yield
        except BaseException:
            self.shutdown()
            raise


def _threads() -> str:
    """OMP_NUM_THREADS as the user set it for this process; empty if it is not set. In ``ray job submit`` Ray sets it to
    1 by default, so there it is ignored."""
    return "" if "RAY_JOB_CONFIG_JSON_ENV_VAR" in os.environ else os.environ.get("OMP_NUM_THREADS", "")
