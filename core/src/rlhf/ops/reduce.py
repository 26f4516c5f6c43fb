"""Aggregation: a declared :class:`~rlhf.types.Reduce` becomes a weight column over the optimizer batch.

Ranks and micro-batches only add ``sum(weight * value)``, so no loss depends on how a batch is split.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from rlhf.ops.batch import Batch, ColumnLevel
from rlhf.ops.spans import repeated, sums
from rlhf.types import Reduce

WEIGHT = "weight/"

LEVEL: dict[str, ColumnLevel] = {
    "token_mean": "tok",
    "seq_mean_token_mean": "tok",
    "seq_mean_token_sum": "tok",
    "seq_sum_constant": "tok",
    "seq_mean": "seq",
    "unit_mean": "unit",
}


def weigh(batch: Batch, reduces: Mapping[str, Reduce]) -> Batch:
    """Add the column ``weight/<term>`` (float32) for every term. ``batch`` is the whole optimizer batch.

    ``seq_mean`` weights are stored on the first sequence of each answer (unit, role) and zero on the others.
    """
    for term, reduce in reduces.items():
        level = LEVEL[reduce.method]
        batch = batch.with_column(level, WEIGHT + term, weights(batch, reduce), over=None)
    return batch


def weights(batch: Batch, reduce: Reduce) -> Tensor:
    """The weights of one term: float32 [N], [B] or [U]; see the table in :class:`~rlhf.types.Reduce`."""
    mask_N = batch.tok[reduce.over]
    if reduce.roles is not None:
        allowed_B = torch.isin(batch.role_B, torch.tensor(reduce.roles, dtype=torch.int64))
        mask_N = mask_N & allowed_B[batch.seq_N]
    if reduce.unit_mask is not None:
        mask_N = mask_N & batch.unit[reduce.unit_mask][batch.unit_N]
    answer_B = batch.answer_B
    tokens_B = sums(mask_N, batch.lens_B).double()
    tokens_S = torch.zeros(batch.answers, dtype=torch.float64).index_add_(0, answer_B, tokens_B)
    live_S = tokens_S > 0
    n_tokens, n_sequences = float(tokens_S.sum()), float(live_S.sum())
    # Nothing is trained on, and the divisors below would be 0.
    if n_tokens == 0:
        size = {"tok": batch.tokens, "seq": batch.sequences, "unit": batch.units}[LEVEL[reduce.method]]
        return torch.zeros(size)
    if LEVEL[reduce.method] == "tok":
        divisors: dict[str, float | Tensor] = {
            "token_mean": n_tokens,
            "seq_mean_token_mean": (tokens_S.clamp(min=1) * n_sequences)[answer_B],
            "seq_mean_token_sum": n_sequences,
            "seq_sum_constant": n_sequences * reduce.constant,
        }
        w_B = (1 / (torch.ones(batch.sequences, dtype=torch.float64) * divisors[reduce.method]) * reduce.coef).float()
        w_N = repeated(w_B, batch.lens_B)
        np.multiply(w_N.numpy(), mask_N.numpy(), out=w_N.numpy())  # torch would convert the whole mask first
        return w_N
    if reduce.method == "seq_mean":
        first_B = torch.ones_like(answer_B, dtype=torch.bool)
        answers: set[int] = set()
        for b, a in enumerate(answer_B.tolist()):
            first_B[b] = a not in answers
            answers.add(a)
        w = (live_S[answer_B] & first_B).double() / n_sequences
    else:  # unit_mean
        live_U = torch.zeros(batch.units, dtype=torch.float64).index_add_(0, batch.unit_B, tokens_B) > 0
        w = live_U.double() / live_U.double().sum()
    return (w * reduce.coef).float()
