"""The devices that Ray reserves for a run: one bundle per rank that owns devices, until they are released."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from rlhf.errors import ConfigError, WorkerError
from rlhf.interfaces import Place
from rlhf_workers.placement import Allocation, allocate, bundles_of

from rlhf_plugin_ray.config import RayConfig


class Reservation:
    """One placement group. The constructor waits for the devices; ConfigError if the cluster does not provide them."""

    def __init__(self, places: Mapping[str, Place], kind: str, config: RayConfig) -> None:
        """``kind``: ``GPU`` | ``CPU``, the kind of the devices."""
        self._timeout = config.start_timeout
        bundles = bundles_of(places, kind)
        self._group = placement_group([dict(b.resources) for b in bundles], strategy=config.strategy)
        try:
            if not self._group.wait(self._timeout):
                free = {k: v for k, v in ray.available_resources().items() if k in ("CPU", "GPU")}
                raise ConfigError(
                    f"the cluster did not provide the {sum(b.devices for b in bundles)} {kind}s of the placement "
                    f"within {self._timeout:g} s (launcher.start_timeout): other jobs hold them. Free now: "
                    f"{', '.join(f'{v:g} {k}s' for k, v in sorted(free.items())) or 'nothing'}. Wait for those jobs to "
                    "end, or request fewer in [placement]."
                )
            node_ids = placement_group_table(self._group)["bundles_to_node_id"]
            self.nodes: list[str] = [node_ids[n] for n in range(len(bundles))]
            """The node id of each bundle."""
            self.allocations = allocate(places, bundles, self.nodes)
            """Allocations by role, in rank order."""
        except BaseException:
            self.release()
            raise
        self._gpus = [b.devices for b in bundles] if kind == "GPU" else None

    @property
    def cuda(self) -> bool:
        """Whether the devices are GPUs."""
        return self._gpus is not None

    def strategy(self, bundle: int) -> PlacementGroupSchedulingStrategy:
        """Scheduling strategy of an actor or task on a bundle."""
        return PlacementGroupSchedulingStrategy(self._group, bundle)

    def visible(self, allocations: Sequence[Allocation]) -> list[list[str] | None]:
        """The GPU ids of each allocation; None without GPUs. Asked on every call, because Ray may move a bundle when a
        node is lost."""
        if self._gpus is None:
            return [None] * len(allocations)

        def location() -> tuple[str, list[str]]:
            return ray.get_runtime_context().get_node_id(), [str(n) for n in ray.get_gpu_ids()]

        answers: dict[int, Any] = {}
        for index in sorted({index for allocation in allocations for index, _ in allocation.slots}):
            # A task that takes all GPUs of a bundle is told their ids. They are free for it, because actors take none.
            strategy = self.strategy(index)
            task = ray.remote(location).options(num_cpus=0, num_gpus=self._gpus[index], scheduling_strategy=strategy)
            answers[index] = task.remote()
        try:
            gpus = dict(zip(answers, ray.get(list(answers.values()), timeout=self._timeout), strict=True))
        except RayError as cause:
            raise WorkerError(
                f"the cluster did not provide the reserved devices of {len(allocations)} processes within "
                f"{self._timeout:g} s (launcher.start_timeout): {type(cause).__name__}. Look at `ray status`: a node "
                "may be lost."
            ) from cause
        for allocation in allocations:
            if len({gpus[index][0] for index, _ in allocation.slots}) > 1:
                raise WorkerError(
                    "a node was lost, and the remaining devices of one process are on two nodes. Continue from the "
                    "newest checkpoint with --resume"
                )
        return [[gpus[index][1][n] for index, n in allocation.slots] for allocation in allocations]

    def release(self) -> None:
        """Release the placement group."""
        if ray.is_initialized():
            remove_placement_group(self._group)
