"""Importance ratios of the current policy to the policy at the start of the update, and their clipping.

Deviations from the papers: (1) every log-ratio is bounded to +-20 before exp, so no ratio is infinite. The gradient
passes through the bound, because it must not vanish for such large ratios.
"""

from __future__ import annotations

import torch
from torch import Tensor

LOG_RATIO_BOUND = 20.0


def bounded(log_ratio: Tensor) -> Tensor:
    """The log-ratio within +-20, with gradient 1 everywhere. Infinite input gives the bound (and no gradient)."""
    clamped_ratio = log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    return torch.where(log_ratio.isinf(), clamped_ratio, clamped_ratio.detach() + (log_ratio - log_ratio.detach()))


def clip(x: Tensor, low: float, high: float) -> Tensor:
    """``x.clamp(low, high)`` with gradient 1 at the bounds. The gradient of torch's clamp has been 0 there since 2.15.
    With a clip range of zero, the ratios of a first step are at the bounds."""
    clamped_x = x.clamp(low, high).detach()
    return torch.where(x == clamped_x, x, clamped_x)


def token_ratio(logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """rho_t = exp(lp_t - lp_old_t), bounded; float32, same shape."""
    return bounded(logprobs.float() - old_logprobs.float()).exp()


def clipped_surrogate(
    ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float, dual_clip: float | None = None
) -> tuple[Tensor, Tensor]:
    """-min(rho A, clip(rho, 1 - low, 1 + high) A) (Schulman et al. 2017, arXiv:1707.06347, eq. 7).

    Unequal ``clip_low`` and ``clip_high`` are clip-higher (Yu et al. 2025, arXiv:2503.14476). ``dual_clip`` c > 1
    bounds the loss at -c A for A < 0 (Ye et al. 2020, arXiv:1912.09729).

    Returns: (loss values to minimise, bool where a clip is active), same shape.
    """
    unclipped, clipped = ratio * advantages, clip(ratio, 1 - clip_low, 1 + clip_high) * advantages
    # Within the range both sides are ratio * advantage. minimum() gives each of two equal values half of the gradient,
    # so that the sum is the gradient of the ratio.
    objective, active = torch.minimum(unclipped, clipped), clipped < unclipped
    if dual_clip is not None:
        floor = dual_clip * advantages
        floor_mask = (advantages < 0) & (objective < floor)
        objective, active = torch.where(floor_mask, floor, objective), active | floor_mask
    return -objective, active
