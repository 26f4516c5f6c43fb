"""Distillation as credit: the log-probs of a teacher at the tokens that the policy sampled."""

from __future__ import annotations

import torch
from rlhf.ops.batch import Batch
from rlhf.ops.spans import masked

TEACHER, TEACHER_LOGPROBS = "teacher", "teacher_logprobs"
"""The frozen role, and the token column with its log-probs."""


def with_teacher(batch: Batch, coef: float) -> tuple[Batch, dict[str, float]]:
    """Add coef (teacher - policy) to the token column ``advantages``, 0 where it is absent (arXiv:2601.02780).

    Both log-probs are those at the sampling temperature, the policy's at the start of the update. In expectation over
    the policy's samples the gradient of this credit is that of -coef KL(policy || teacher) of the next token; credit
    of later tokens is left out, as published.

    Returns: the batch, and ``teacher/kl``, the mean of (policy - teacher) over the sampled tokens [nats]: an estimate
    of KL(policy || teacher).
    """
    mask_N = batch.tok["loss_mask"]
    gap_N = batch.column(TEACHER_LOGPROBS).double() - batch.column("old_logprobs").double()
    gap_N = torch.where(mask_N, gap_N, torch.zeros_like(gap_N))
    task_N = batch.tok["advantages"].double() if "advantages" in batch.tok else torch.zeros_like(gap_N)
    own_A = masked(gap_N, mask_N)
    mean = float(own_A.mean()) if own_A.numel() else 0.0
    return batch.with_column("tok", "advantages", (task_N + coef * gap_N).float()), {"teacher/kl": -mean}
