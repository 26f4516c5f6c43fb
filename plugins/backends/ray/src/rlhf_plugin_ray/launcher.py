"""The launcher ``ray``: every rank and every engine is an actor of a Ray cluster."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, ClassVar

import ray
from rlhf.errors import ConfigError
from rlhf.interfaces import Place
from rlhf.plugins import Resolved
from rlhf_workers.driver.handle import WorkerHandle, slug
from rlhf_workers.driver.version_check import check_versions
from rlhf_workers.launcher import ReservedDevices, WorkerLauncher
from rlhf_workers.placement import Allocation, check_fits, device_kind

from rlhf_plugin_ray.actors import Actor, RayCalls, RayWorker
from rlhf_plugin_ray.cluster.connection import Cluster
from rlhf_plugin_ray.cluster.reservation import Reservation
from rlhf_plugin_ray.config import RayConfig


class RayLauncher(WorkerLauncher):
    """Reserves one placement group for the run, and starts one actor process per rank and per engine.

    :meth:`place` refuses impossible placements before anything is loaded. If a launch fails, everything is released.
    """

    name = "ray"
    capabilities: ClassVar[frozenset[str]] = frozenset({"processes", "ranks:many", "nodes:many", "answers"})
    Config = RayConfig

    def __init__(self, config: RayConfig | None = None) -> None:
        super().__init__(config)
        self._cluster: Cluster | None = None
        self._reservation: Reservation | None = None
        self._starts: Counter[str] = Counter()

    @classmethod
    def is_local(cls, config: Any) -> bool:
        """True for a Ray that the run starts; any other cluster may have other machines."""
        return config.address is None and not os.environ.get("RAY_ADDRESS") and not ray.is_initialized()

    def place(self, places: Mapping[str, Place], plugins: Sequence[Resolved] = (), reports: Path | None = None) -> None:
        self._begin_placing(plugins, reports)
        with self._or_nothing():
            self._cluster = Cluster(self.config)
            nodes = self._cluster.nodes()
            check_fits(places, nodes, self.config.strategy)
            reserved = self._reservation = Reservation(places, device_kind(nodes), self.config)
            self._reserved_devices = ReservedDevices(RayCalls(), reserved.allocations, reserved.nodes, reserved.cuda)

    def shutdown(self) -> None:
        with ExitStack() as last_first:
            if self._cluster is not None:
                last_first.callback(self._cluster.close)
                if self._cluster.control.lost:  # every call below would wait for it; the workers end with Ray
                    self._launched, self._running, self._reservation = [], [], None
            if self._reservation is not None:
                last_first.callback(self._reservation.release)
            self._end_workers(last_first)
            self._reservation, self._cluster = None, None

    # -------------------------------------------------------------------------- how processes start

    def _start(self, allocations: Mapping[str, Allocation]) -> list[WorkerHandle]:
        assert self._reservation is not None
        members: list[WorkerHandle] = []
        visible = self._reservation.visible(list(allocations.values()))
        for (name, allocation), gpus in zip(allocations.items(), visible, strict=True):
            env = {"OMP_NUM_THREADS": _threads() or str(allocation.threads), **self.config.env}
            remote = ray.remote(concurrency_groups={"watch": 1})  # type: ignore[call-overload]  # ray's types lack it
            actor = remote(RayWorker).options(
                num_cpus=allocation.cpus,
                # The placement group holds the GPUs. Several actors may share one, and CUDA_VISIBLE_DEVICES names them.
                num_gpus=0,
                max_restarts=0,
                scheduling_strategy=self._reservation.strategy(allocation.bundle),
                **self._actor_name(name),
            )
            try:
                members.append(Actor(name, actor.remote(name, os.getcwd(), env, gpus)))
            except ValueError as cause:
                raise ConfigError(
                    f"{cause}. Another run of this cluster has a worker of this name in launcher.namespace = "
                    f"{self.config.namespace!r}. Set another namespace, or remove the option."
                ) from cause
            self._running.append(members[-1])
        self._describe(members)
        check_versions([m.facts for m in members])
        return members

    def _check_reachable(self) -> None:
        if self._cluster is not None:
            self._cluster.control.check()

    def _actor_name(self, name: str) -> dict[str, str]:
        """With ``launcher.namespace`` workers have names in it: ``policy-0``, ``engine-0``, and ``engine-0.1`` for the
        first replacement of engine 0."""
        if self.config.namespace is None:
            return {}
        starts, self._starts[name] = self._starts[name], self._starts[name] + 1
        return {"name": slug(name) + f".{starts}" * bool(starts), "namespace": self.config.namespace}


def _threads() -> str:
    """OMP_NUM_THREADS as the user set it for this process; empty if it is not set. ``ray job submit`` sets it to 1 by
    default, so it is ignored there."""
    return "" if "RAY_JOB_CONFIG_JSON_ENV_VAR" in os.environ else os.environ.get("OMP_NUM_THREADS", "")
