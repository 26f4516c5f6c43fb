"""Reward shaping by length. Length is the number of tokens the policy itself sampled; observations do not count.

Shape suffix: U trajectories.
"""

from __future__ import annotations

import torch
from torch import Tensor


def overlong_penalty(own_tokens_U: Tensor, max_length: int, buffer: int, factor: float = 1.0) -> Tensor:
    """Soft overlong punishment (Yu et al. 2025, arXiv:2503.14476, eq. 13), <= 0, float64 [U].

    e = min(len - (max_length - buffer), buffer);  penalty = -factor e / buffer where e > 0: a ramp over the last
    ``buffer`` tokens before ``max_length``, then constant.
    """
    excess = (own_tokens_U.double() - (max_length - buffer)).clamp(min=0, max=buffer)
    return -factor * excess / buffer


def stop_properly(r_U: Tensor, truncated_U: Tensor, coef: float) -> Tensor:
    """Truncated samples: r * coef for 0 <= coef <= 1; r = coef for coef < 0 (ProRL, arXiv:2505.24864).

    Note that coef in 0 .. 1 makes a *negative* reward milder; for rewards below 0 give a negative coef.
    """
    shaped_U = r_U * coef if coef >= 0 else torch.full_like(r_U, coef)
    return torch.where(truncated_U, shaped_U, r_U)
