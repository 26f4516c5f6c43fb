"""Second values of a rank's part of the weights: their moving average, or their initial values."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from rlhf_modeling.sharded.partition import Partition


class ShardedCopy:
    """See :class:`rlhf_modeling.ema.Copy`."""

    def __init__(self, partition: Partition) -> None:
        self.partition = partition
        self.tensors = [flat.data.clone() for flat in partition.flats]
        """[n] for each flat."""

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Context in which every rank computes with the second values. All ranks enter and leave it together."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def move(self, device: torch.device | str) -> None:
        self.tensors = [t.to(device) for t in self.tensors]

    @torch.no_grad()
    def update(self, decay: float) -> None:
        """See :meth:`rlhf_modeling.ema.Copy.update`."""
        torch._foreach_lerp_(self.tensors, [flat.data for flat in self.partition.flats], 1.0 - decay)

    @torch.no_grad()
    def _swap(self) -> None:
        for flat, second in zip(self.partition.flats, self.tensors, strict=True):
            # The flats are views of the optimizer's memory, so values are exchanged and not tensors.
            live = flat.data.clone()
            flat.data.copy_(second)
            second.copy_(live)
        self.partition.publish()
