"""Fabricated optimizer batches for trainers, and the gradients that a trainer computes from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlhf.interfaces.loss import Loss
from rlhf.ops.batch import Batch
from rlhf.ops.heads import resolve_head
from rlhf.ops.loss_value import add_sums, finish_sums, over_mask, required_columns
from rlhf.ops.reduce import weigh
from torch import Tensor

from rlhf_testing import fabricate
from rlhf_testing.recording import Recording


def columns(batch: Batch) -> Batch:
    """The batch with the columns that the suite's losses and heads read: ``targets``, and ``context_mask``, which has
    the tokens outside the loss mask of every second unit, without first tokens."""
    context_N = ~batch.tok["loss_mask"] & (batch.position_N > 0) & (batch.unit_N % 2 == 0)
    batch = batch.with_column("tok", "context_mask", context_N, over=None)
    return batch.with_column("tok", "targets", fabricate.values("targets", batch.tokens, 0))


def optimizer_batch(loss: Loss, seed: int = 1) -> Batch:
    """A weighted batch with every column that ``loss`` needs. A score belongs to one sequence, so for a loss that reads
    scores every answer is a single sequence."""
    return weigh(columns(fabricate.batch(seed, fresh="scores" not in loss.outputs())), loss.reduce())


def slim_batch(batch: Batch, loss: Loss) -> Batch:
    """The batch with only the columns that are sent to a rank."""
    return batch.select_columns(required_columns(loss, [resolve_head(o, over_mask(loss)) for o in loss.outputs()]))


def learned(
    trainer: Any, batch: Batch, loss: Loss, calls: Sequence[Sequence[Sequence[int]]]
) -> tuple[dict[str, Tensor], dict[str, float], float]:
    """(gradients, finished sums, sum |w x|) after one ``accumulate`` per element of ``calls``. The gradients are
    cleared afterwards."""
    slim, recording = slim_batch(batch, loss), Recording(loss)
    total: Mapping[str, tuple[float, float]] = {}
    trainer.zero_grad()
    for parts in calls:
        sums = trainer.accumulate([slim.select(p) for p in parts], recording, {}, {})
        total = add_sums([total, sums])
    gradients = {k: v.clone() for k, v in trainer.gradients().items()}
    trainer.zero_grad()
    return gradients, finish_sums(total), recording.size
