"""Which parameters the first step reached, over all ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from rlhf.weights.fingerprint import fingerprint

from rlhf_modeling.sharded.partition import Partition
from rlhf_modeling.sharded.process_group import largest


class Coverage:
    """Constructed before the step and read after it. ``names``: all trained parameters, in the order of the report."""

    def __init__(self, partition: Partition, names: Sequence[str], device: torch.device) -> None:
        self.partition, self.names, self.device = partition, list(names), device
        self._row = {name: n for n, name in enumerate(self.names)}
        self._reached = [False] * len(self.names)
        for index in range(len(partition.flats)):
            for piece, gradient in partition.piece_gradients(index):
                self._reached[self._row[piece.name]] |= bool(gradient.any())
        self._before = self._fingerprints()

    def after(self) -> dict[str, list[str]]:
        """``without_gradient`` and ``unchanged``; every rank calls it and gets the same."""
        changed = [False] * len(self.names)
        for name, mark in self._fingerprints().items():
            changed[self._row[name]] = mark != self._before[name]
        flags = torch.tensor([self._reached, changed], dtype=torch.int32, device=self.device)
        reached, moved = largest(flags).tolist()
        return {
            "without_gradient": [n for n, yes in zip(self.names, reached, strict=True) if not yes],
            "unchanged": [n for n, yes in zip(self.names, moved, strict=True) if not yes],
        }

    def _fingerprints(self) -> dict[str, str]:
        return {
            piece.name: fingerprint(flat.data[piece.offset : piece.offset + piece.numel])
            for flat in self.partition.flats
            for piece in flat.pieces
        }
