"""The elements of the parameters that a rank owns, as tensors that the optimizer updates.

A :class:`Flat` is one tensor that the optimizer updates on this rank. Its pieces name the elements of the parameters
that it holds. Together the ranks' pieces cover every parameter once, or every rank holds all of them (``replicated``).
A :class:`Split` describes which parameters the ranks of a replica divide into parts (tensor parallel).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Piece:
    """``numel`` elements of parameter ``name``, from its element ``start``, at ``offset`` of a flat."""

    name: str
    start: int
    offset: int
    numel: int


@dataclass(slots=True)
class Flat:
    owner: Tensor
    """The tensor whose state the optimizer keeps."""
    pieces: list[Piece]
    names: list[str]
    """Names of the parameters in this flat on any rank. The list is the same on every rank."""

    @property
    def data(self) -> Tensor:
        """[n] fp32, a view of :attr:`owner`. Holds the masters of weights in bf16. It is bf16 for a frozen role that is
        stored in bf16."""
        return self.owner.detach().view(-1)


class Partition(ABC):
    """The rank's share of a role's parameters."""

    flats: list[Flat]
    """The same list on every rank: the same number of flats, with the same names, in the same order."""
    replicated: bool = False
    """Every rank holds all elements."""

    @abstractmethod
    def gradients(self, index: int) -> list[Tensor]:
        """The reduced gradient of flat ``index``, as consecutive tensors that may be scaled in place. Empty if there is
        no gradient."""

    @abstractmethod
    def publish(self) -> None:
        """Send the new values to every rank. Must be called after a change of the flats."""

    def piece_gradients(self, index: int) -> Iterator[tuple[Piece, Tensor]]:
        """(piece, [numel] its gradient); zeros if it has none."""
        flat, parts = self.flats[index], self.gradients(index)
        gradient = torch.cat([p.detach().reshape(-1) for p in parts]) if parts else torch.zeros_like(flat.data)
        for piece in flat.pieces:
            yield piece, gradient[piece.offset : piece.offset + piece.numel]

    def views(self, index: int) -> Iterator[tuple[Piece, list[Tensor]]]:
        """(piece, its reduced gradient as consecutive 1-D views); no views if it has none."""
        parts = [p.detach().view(-1) for p in self.gradients(index)]
        ends = list(accumulate(p.numel() for p in parts))
        for piece in self.flats[index].pieces:
            slices, part_index, end = [], bisect_right(ends, piece.offset), piece.offset + piece.numel
            while part_index < len(parts) and (start := ends[part_index] - parts[part_index].numel()) < end:
                slices.append(parts[part_index][max(piece.offset - start, 0) : end - start])
                part_index += 1
            yield piece, slices


def scale(tensors: Sequence[Tensor], factor: float) -> None:
    if tensors:
        torch._foreach_mul_(list(tensors), factor)


class RankTopology(Protocol):
    """The ranks of a role as replicas x parts. The ranks of a replica divide every layer. The ranks of a part hold the
    same weights and compute different units."""

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
    """The division of one model over the ranks of a replica. In this class every parameter is whole; a trainer that
    divides layers overrides it."""

    def __init__(self, topology: RankTopology) -> None:
        self.topology = topology

    def dim(self, name: str) -> int | None:
        """The dimension along which a parameter is divided into equal parts; None: it is whole."""
        return None

    def shape(self, name: str, part: torch.Size) -> torch.Size:
        """Shape of the whole parameter; ``part`` is the shape of a rank's part."""
        return part

    def local_part(self, name: str, tensor: Tensor) -> Tensor:
        """This rank's part, a view."""
        return tensor

    def write(self, tensor: Tensor, piece: Piece, values: Tensor) -> None:
        """Write the piece's ``values`` [numel] into the whole parameter ``tensor``, which is zero elsewhere."""
        own_part = self.local_part(piece.name, tensor)
        part = own_part.new_zeros(own_part.numel())
        part[piece.start : piece.start + piece.numel] = values
        own_part.copy_(part.view(own_part.shape))

    def counts(self, name: str) -> bool:
        """Whether this rank contributes the parameter to sums over ranks."""
        return True

    def agree(self, partition: Partition) -> None:
        """Complete the gradients of a replica's ranks, after the sum over the replicas."""

    def squares(self, partition: Partition, index: int) -> float:
        """Sum of squares of a flat's gradient."""
        parts = partition.gradients(index)
        return float(torch.nn.utils.get_total_norm(parts)) ** 2 if parts else 0.0
