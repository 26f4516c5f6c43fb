"""Batches, their distribution over ranks, and model specs for tests of trainers over several ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from rlhf.interfaces import Loss, ModelSpec
from rlhf.ops.batch import Batch
from rlhf.ops.loss_value import FILLER
from rlhf.ops.reduce import WEIGHT, weigh
from rlhf.types import RoleSpec
from rlhf_testing import fabricate
from rlhf_testing.optimizer_batch import columns, slim_batch
from rlhf_testing.suite_losses import TokenLoss
from torch import Tensor

STEPS = 5


def batch(seed: int, loss: Loss | None = None, units: int = 7) -> Batch:
    """An optimizer batch with weights, of units of different length."""
    loss = loss or TokenLoss()
    raw = fabricate.batch(seed, units=units, fresh="scores" not in loss.outputs())
    return slim_batch(weigh(columns(raw), loss.reduce()), loss)


def shares(full_batch: Batch, ranks: int, budget: int = 40) -> list[list[Batch]]:
    """[rank][micro-batch], distributed like a controller does: the same number for every rank, of different sizes, none
    empty. A missing micro-batch is filled with the shortest unit, with weight zero."""
    tokens = full_batch.tokens_per_unit()
    units = sorted(range(full_batch.units), key=lambda u: -tokens[u])
    micros = max(-(-sum(tokens) // (budget * ranks)), -(-len(units) // (4 * ranks)))
    bins: list[list[int]] = [units[n :: micros * ranks] for n in range(micros * ranks)]
    micros_of_ranks = [full_batch.select(sorted(b)) if b else _filler(full_batch.select([units[-1]])) for b in bins]
    return [micros_of_ranks[rank::ranks] for rank in range(ranks)]


def _filler(micro: Batch) -> Batch:
    for level in ("tok", "seq", "unit"):
        for name, values in list(getattr(micro, level).items()):
            if name.startswith(WEIGHT):
                micro = micro.with_column(level, name, torch.zeros_like(values), over=None)
    return micro.with_column("unit", FILLER, torch.ones(micro.units, dtype=torch.bool))


def spec(
    folder: Path, rank: int = 0, ranks: int = 1, port: str = "", head: str = "lm", trained: bool = True, **options: Any
) -> ModelSpec:
    path = folder / ("model" if head == "lm" else "critic")
    meet = f"tcp://127.0.0.1:{port}" if ranks > 1 else ""
    facts = {"dtype": "fp32", "seed": 3, "total_updates": 10, **options}
    return ModelSpec(
        RoleSpec("policy", head, trained), str(path), rank=rank, world_size=ranks, rendezvous=meet, **facts
    )


def apart(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """Norm of the difference divided by the norm of ``b``, over all tensors."""
    assert a.keys() == b.keys()
    x, y = (torch.cat([d[n].detach().float().flatten() for n in b]) for d in (a, b))
    return float((x - y).norm() / y.norm())
