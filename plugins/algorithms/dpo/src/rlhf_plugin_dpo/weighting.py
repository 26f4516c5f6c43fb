"""Weights of tokens and pairs that some variants of DPO add to any loss of a pair."""

from __future__ import annotations

from typing import Any

import torch
from rlhf.types import Head
from torch import Tensor


def tail_weights(answer_A: Tensor, answers: int, alpha: float) -> Tensor:
    """[A]: 1 for a token within the length of the shorter answer of its pair, ``alpha`` for later tokens.

    Liu et al. 2024, LD-DPO, arXiv:2409.06411: the excess tokens of the longer answer have less weight. ``answer_A`` is
    the answer of each trained token. Answers 2u and 2u + 1 belong to pair u.
    """
    count_S = torch.bincount(answer_A, minlength=answers)
    shared_S = count_S.view(-1, 2).min(1).values.repeat_interleave(2)
    # The position of a token in its answer is its place among all tokens in the order of answers, less the first place
    # of its answer.
    order_A = torch.sort(answer_A, stable=True).indices
    start_S = torch.cumsum(count_S, 0) - count_S
    position_A = torch.empty_like(answer_A)
    position_A[order_A] = torch.arange(answer_A.numel(), device=answer_A.device) - start_S[answer_A[order_A]]
    return torch.where(position_A < shared_S[answer_A], 1.0, alpha)


def _log_sum_squares(logits_CV: Tensor, ids_C: Tensor, columns: Any, constants: Any) -> Tensor:
    return torch.logsumexp(2 * torch.log_softmax(logits_CV, 1), 1)


LOG_SUM_SQUARES = Head("log_sum_squares", _log_sum_squares)
"""log sum_v p(v)^2 of the distribution that predicts a token: the log of the mean probability of tokens sampled from
it."""


def pair_weights(mean_aligned_chosen_U: Tensor, mean_aligned_rejected_U: Tensor) -> Tensor:
    """[U], without gradient: the weight of a pair by the policy's probability of both answers: exp of the sum over the
    two answers of the mean of log p(token) - log sum_v p(v)^2. Zhou et al. 2024, WPO, arXiv:2406.11827, eq. 2 with its
    sampled alignment."""
    return (mean_aligned_chosen_U + mean_aligned_rejected_U).detach().exp()
