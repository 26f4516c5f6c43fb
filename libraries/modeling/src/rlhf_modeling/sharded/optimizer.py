"""Muon for matrices that are divided over ranks.

Muon (Jordan et al. 2024) replaces a matrix's momentum by the nearest orthogonal matrix, which requires the whole
matrix. Each rank keeps the momentum of its own elements. In each round, every rank collects the momentum of one matrix,
orthogonalises it with torch's own iteration, and sends it back. So in every stage and with ``tensor_parallel`` the step
is the same as the step of ``torch.optim.Muon`` with ``adjust_lr_fn = "match_rms_adamw"`` (Liu et al. 2025), which is as
large as AdamW's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import _muon

from rlhf_modeling.optimizer import OrthogonalAdamW
from rlhf_modeling.sharded.partition import Flat, Partition, Piece, Split

COEFFICIENTS = (_muon.DEFAULT_A, _muon.DEFAULT_B, _muon.DEFAULT_C)
MOMENTUM = "momentum_buffer"


class DividedOrthogonalAdamW(OrthogonalAdamW):
    """:meth:`bind` must be called before the first step. (The class name avoids the word Muon: DeepSpeed searches for
    it and then replaces the step by its own.)"""

    def bind(self, partition: Partition, shapes: Mapping[str, torch.Size], split: Split) -> None:
        """``shapes``: shapes of whole parameters."""
        self._partition, self._shapes, self._split = partition, shapes, split

    def muon_step(self, group: dict[str, Any]) -> None:
        owners = {id(p) for p in group["params"]}
        flats = [flat for flat in self._partition.flats if id(flat.owner) in owners]
        updates: dict[str, tuple[Flat, Piece, Tensor]] = {}
        for flat in flats:
            if flat.owner.grad is None:
                continue
            gradient = flat.owner.grad.reshape(-1)
            momentum = self.state[flat.owner].setdefault(MOMENTUM, torch.zeros_like(flat.owner)).view(-1)
            momentum.lerp_(gradient, 1 - group["momentum"])
            update = gradient.lerp(momentum, group["momentum"])  # Nesterov's
            for piece in flat.pieces:
                updates[piece.name] = flat, piece, update[piece.offset : piece.offset + piece.numel]
        # Every rank goes through all names, also of matrices of which it has no element, because all must exchange
        # them.
        names = [name for flat in flats for name in flat.names]
        size, rank = dist.get_world_size(), dist.get_rank()
        for first in range(0, len(names), size):
            turn = names[first : first + size]
            matrices = [self._gathered(name, updates.get(name), target_rank) for target_rank, name in enumerate(turn)]
            if rank < len(turn):
                matrix = matrices[rank].view(self._shapes[turn[rank]])
                steps = _muon._zeropower_via_newtonschulz(matrix, COEFFICIENTS, _muon.DEFAULT_NS_STEPS, _muon.EPS)
                matrices[rank] = steps.to(torch.float32).reshape(-1)
            for source_rank, name in enumerate(turn):
                if size > 1:
                    dist.broadcast(matrices[source_rank], src=source_rank)
                if name in updates:
                    own_update = self._split.local_part(name, matrices[source_rank].view(self._shapes[name])).reshape(
                        -1
                    )
                    self._apply(*updates[name][:2], own_update, group)

    def _gathered(self, name: str, update: tuple[Flat, Piece, Tensor] | None, target_rank: int) -> Tensor:
        """[numel] the update of the whole matrix, on rank ``target_rank``."""
        device = update[2].device if update is not None else self._partition.flats[0].owner.device
        split, replicated = self._split, self._partition.replicated
        matrix = torch.zeros(self._shapes[name], device=device)
        # Every rank has the whole update, so nothing needs to be collected.
        everywhere = replicated and split.topology.parts == 1
        spare = replicated and split.topology.replica > 0  # another replica sends the same elements
        if update is not None and (everywhere or (split.counts(name) and not spare)):
            split.write(matrix, *update[1:])
        if not everywhere and dist.get_world_size() > 1:
            dist.reduce(matrix, dst=target_rank)
        return matrix.view(-1)

    def _apply(self, flat: Flat, piece: Piece, update: Tensor, group: dict[str, Any]) -> None:
        """``update``: the update of this rank's part of the matrix."""
        weights = flat.data[piece.offset : piece.offset + piece.numel]
        weights.mul_(1 - group["lr"] * group["weight_decay"])
        rate = group["lr"] * 0.2 * math.sqrt(max(self._shapes[piece.name]))
        weights.add_(update[piece.start : piece.start + piece.numel], alpha=-rate)
