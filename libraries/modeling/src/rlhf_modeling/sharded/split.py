"""The places of ranks, and which parameters are divided into parts (tensor parallel)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from rlhf_modeling.sharded.partition import Partition


class RankTopology(Protocol):
    """The ranks of a role as replicas x parts: the ranks of a replica divide every layer among them, the ranks of a
    part hold the same weights and compute different units."""

    parts: int
    part: int
    replicas: int
    replica: int


@dataclass(slots=True)
class Replicas:
    """Every rank is a whole replica."""

    replica: int
    replicas: int
    part: int = 0
    parts: int = 1


class Split:
    """How one model is divided over the ranks of a replica. Here every parameter is whole; a trainer that divides
    layers overrides this class."""

    def __init__(self, topology: RankTopology) -> None:
        self.topology = topology

    def dim(self, name: str) -> int | None:
        """The dimension along which the equal parts of a parameter lie; None: it is whole."""
        return None

    def shape(self, name: str, part: torch.Size) -> torch.Size:
        """Shape of the whole parameter; ``part`` is the shape of a rank's part."""
        return part

    def own(self, name: str, whole: Tensor) -> Tensor:
        """This rank's part, a view."""
        return whole

    def counts(self, name: str) -> bool:
        """Whether this rank contributes the parameter to sums over ranks."""
        return True

    def agree(self, partition: Partition) -> None:
        """Complete the gradients of a replica's ranks after they were summed over the replicas."""

    def squares(self, partition: Partition, index: int) -> float:
        """Sum of squares of a flat's gradient."""
        parts = partition.gradients(index)
        return float(torch.nn.utils.get_total_norm(parts)) ** 2 if parts else 0.0
