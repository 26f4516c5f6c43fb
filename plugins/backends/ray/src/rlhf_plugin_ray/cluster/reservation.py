"""What Ray reserved for a run: a bundle of devices per rank that owns some, until it is released."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from rlhf.errors import ConfigError, WorkerError
from rlhf.interfaces import Place

from rlhf_plugin_ray.cluster.placement import Allocation, allocate, bundles_of
from rlhf_plugin_ray.config import RayConfig


class Reservation:
    """One placement group. Making it waits for the devices; ConfigError where the cluster does not give them."""

    def __init__(self, places: Mapping[str, Place], kind: str, config: RayConfig) -> None:
        """``kind``: ``GPU`` | ``CPU``, of the devices."""
        self._timeout = config.start_timeout
        bundles = bundles_of(places, kind)
        self._group = placement_group([dict(b.resources) for b in bundles], strategy=config.strategy)
        try:
            if not self._group.wait(self._timeout):
                free = {k: v for k, v in ray.available_resources().items() if k in ("CPU", "GPU")}
                raise ConfigError(
                    f"the cluster did not give the {sum(b.devices for b in bundles)} {kind}s of the placement within "
                    f"{self._timeout:g} s (launcher.start_timeout): others hold them. Free now: "
                    f"{', '.join(f'{v:g} {k}s' for k, v in sorted(free.items())) or 'nothing'}. Wait for them to end, "
                    "or ask for less in [placement]."
                )
            at = placement_group_table(self._group)["bundles_to_node_id"]
            self.nodes: list[str] = [at[n] for n in range(len(bundles))]
            """Of each bundle, where it is."""
            self.allocations = allocate(places, bundles, self.nodes)
            """By role, in rank order."""
        except BaseException:
            self.release()
            raise
        self._gpus = [b.devices for b in bundles] if kind == "GPU" else None

    @property
    def cuda(self) -> bool:
        """Whether the devices are GPUs."""
        return self._gpus is not None

    def at(self, bundle: int) -> PlacementGroupSchedulingStrategy:
        """For the options of what is to run on a bundle."""
        return PlacementGroupSchedulingStrategy(self._group, bundle)

    def visible(self, allocations: Sequence[Allocation]) -> list[list[str] | None]:
        """The GPUs of each allocation, asked anew each time: after the loss of a node Ray may have moved a bundle."""
        if self._gpus is None:
            return [None] * len(allocations)

        def mine() -> tuple[str, list[str]]:
            return ray.get_runtime_context().get_node_id(), [str(n) for n in ray.get_gpu_ids()]

        asked: dict[int, Any] = {}
        for index in sorted({index for allocation in allocations for index, _ in allocation.slots}):
            where = self.at(index)
            task = ray.remote(mine).options(num_cpus=0, num_gpus=self._gpus[index], scheduling_strategy=where)
            asked[index] = task.remote()
        try:
            found = dict(zip(asked, ray.get(list(asked.values()), timeout=self._timeout), strict=True))
        except RayError as cause:
            raise WorkerError(
                f"the cluster did not give the devices of {len(allocations)} processes within {self._timeout:g} s "
                f"(launcher.start_timeout), though they are reserved: {type(cause).__name__}. Look at `ray status`: a "
                "node may be lost."
            ) from cause
        for allocation in allocations:
            if len({found[index][0] for index, _ in allocation.slots}) > 1:
                raise WorkerError(
                    "a node was lost, and what is left of the devices of one process lies on two nodes: the run "
                    "continues from its newest checkpoint with --resume"
                )
        return [[found[index][1][n] for index, n in allocation.slots] for allocation in allocations]

    def release(self) -> None:
        """Give everything back."""
        if ray.is_initialized():
            remove_placement_group(self._group)
