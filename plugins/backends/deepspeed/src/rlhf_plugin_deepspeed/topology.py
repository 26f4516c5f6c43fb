"""The ranks of a role as replicas x parts. The ranks of a replica divide every layer. The ranks of a part hold the same
weights and compute different units.

Rank ``replica * parts + part``: the parts of a replica, which wait for each other in every layer, are adjacent.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from rlhf.errors import CapabilityError
from rlhf.interfaces import ModelSpec

_groups: dict[int, tuple[Any, Any]] = {}
"""{parts: (group of this rank's replica, group of its part)}; all roles of a process have the same ranks."""


def check_parts(spec: ModelSpec, parts: int) -> None:
    """Raises CapabilityError if ``parts`` does not divide the role's ranks."""
    if spec.world_size % parts:
        raise CapabilityError(
            f"tensor_parallel = {parts} does not divide the {spec.world_size} ranks of role {spec.role.name!r}: set "
            f"placement.{spec.role.name}.ranks = {-(-spec.world_size // parts) * parts}, or another tensor_parallel "
            "(a role's own trainer section may set 1)"
        )


class Topology:
    """The place of this rank. Constructed after the role's process group was created. DeepSpeed calls such an object
    ``mpu`` and uses its ``get_...`` methods: model-parallel ranks are the parts, data-parallel ranks the replicas."""

    def __init__(self, spec: ModelSpec, parts: int, seconds: float) -> None:
        check_parts(spec, parts)
        self.parts, self.part = parts, spec.rank % parts
        self.replicas, self.replica = spec.world_size // parts, spec.rank // parts
        self.first = self.replica * parts
        """The first rank of the replica."""
        self.group: Any = None
        """Process group of the replica's ranks; None if every rank is a whole replica."""
        if parts > 1:
            self.group, self._same_part = _groups.get(parts) or self._make_groups(seconds)

    def _make_groups(self, seconds: float) -> tuple[Any, Any]:
        """Every rank creates every group, in the same order, as torch requires."""
        own_groups: list[Any] = [None, None]
        replicas = [[r * self.parts + p for p in range(self.parts)] for r in range(self.replicas)]
        same_part = [[r * self.parts + p for r in range(self.replicas)] for p in range(self.parts)]
        for kind, sets in enumerate((replicas, same_part)):
            for ranks in sets:
                group = dist.new_group(ranks, timeout=timedelta(seconds=seconds))
                if self.first + self.part in ranks:
                    own_groups[kind] = group
        _groups[self.parts] = own_groups[0], own_groups[1]
        return _groups[self.parts]

    @contextmanager
    def used_by_deepspeed(self) -> Iterator[None]:
        """Context in which DeepSpeed uses this topology. DeepSpeed has one such object for all engines of a process,
        and reads it when an engine starts, reduces and steps."""
        groups: Any = importlib.import_module("deepspeed.utils.groups")
        previous_mpu, groups.mpu = groups.mpu, self.mpu
        try:
            yield
        finally:
            groups.mpu = previous_mpu

    @property
    def mpu(self) -> Topology | None:
        return self if self.parts > 1 else None

    # ------------------------------------------------------------------- methods that DeepSpeed calls

    def get_model_parallel_world_size(self) -> int:
        return self.parts

    get_tensor_model_parallel_world_size = get_model_parallel_world_size

    def get_model_parallel_rank(self) -> int:
        return self.part

    get_tensor_model_parallel_rank = get_model_parallel_rank

    def get_model_parallel_group(self) -> Any:
        return self.group

    get_tensor_model_parallel_group = get_model_parallel_group

    def get_data_parallel_world_size(self) -> int:
        return self.replicas

    def get_data_parallel_rank(self) -> int:
        return self.replica

    def get_data_parallel_group(self) -> Any:
        return self._same_part
