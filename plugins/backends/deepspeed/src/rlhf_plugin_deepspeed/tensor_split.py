"""Which parameters are divided into parts (``tensor_parallel``), and conversion between parts and whole tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
from rlhf_modeling.sharded.partition import Partition, Split
from torch import Tensor

from rlhf_plugin_deepspeed.topology import Topology


class TensorSplit(Split):
    """The division of one model over the ranks of a replica. Without arguments every parameter is whole.

    Args:
        dims: {divided parameter: the dimension along which it is divided into equal parts}, in the order of the
            replica's ranks.
        partial: whole parameters whose gradients on the ranks are parts of a sum. The gradients of the other whole
            parameters are equal on all ranks of a replica.
    """

    topology: Topology

    def __init__(self, topology: Topology, dims: Mapping[str, int] | None = None, partial: Iterable[str] = ()) -> None:
        super().__init__(topology)
        self.dims, self.partial = dict(dims or {}), frozenset(partial)

    def dim(self, name: str) -> int | None:
        return self.dims.get(name)

    def shape(self, name: str, part: torch.Size) -> torch.Size:
        """Shape of the whole parameter; ``part`` is the shape of a rank's part."""
        if name not in self.dims:
            return part
        sizes = list(part)
        sizes[self.dims[name]] *= self.topology.parts
        return torch.Size(sizes)

    def local_part(self, name: str, tensor: Tensor) -> Tensor:
        """This rank's part, a view."""
        if name not in self.dims:
            return tensor
        return tensor.chunk(self.topology.parts, self.dims[name])[self.topology.part]

    def counts(self, name: str) -> bool:
        """Whether this rank contributes the parameter to sums over ranks. A divided parameter counts on every rank, a
        whole parameter on one rank of each replica."""
        return name in self.dims or self.topology.part == 0

    @torch.no_grad()
    def full_tensor(self, name: str, part: Tensor) -> Tensor:
        """The whole parameter, assembled from the parts of a replica's ranks, which all call this method. A parameter
        that is not divided is returned unchanged."""
        if name not in self.dims:
            return part
        part = part.detach().contiguous()
        parts = [torch.empty_like(part) for _ in range(self.topology.parts)]
        dist.all_gather(parts, part, group=self.topology.group)
        return torch.cat(parts, self.dims[name])

    # ----------------------------------------------------------------------------------- gradients

    @torch.no_grad()
    def agree(self, partition: Partition) -> None:
        """After the sum of gradients over the replicas: add gradients that are parts of a sum, and give all ranks of a
        replica the same gradients of whole parameters. The kernels of a GPU may add in a different order on each rank;
        the ranks would then silently take different steps."""
        if self.topology.parts == 1:
            return
        for index in range(len(partition.flats)):
            for piece, views in partition.views(index):
                for view in views if piece.name not in self.dims else ():
                    if piece.name in self.partial:
                        dist.all_reduce(view, group=self.topology.group)
                    else:
                        dist.broadcast(view, self.topology.first, group=self.topology.group)

    def squares(self, partition: Partition, index: int) -> float:
        """Sum of squares of a flat's gradient. A parameter that is whole on all ranks of a replica counts on one of
        them."""
        if self.topology.parts == 1:
            return super().squares(partition, index)
        views = [v for piece, tensors in partition.views(index) if self.counts(piece.name) for v in tensors]
        return float(torch.nn.utils.get_total_norm(views)) ** 2 if views else 0.0
