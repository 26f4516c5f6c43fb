"""The log-odds of a probability that is given as its logarithm."""

from __future__ import annotations

import torch
from torch import Tensor

CLOSEST = -1e-6
"""Upper bound of log-probs. At 0 the odds are infinite; at the bound they are a million to one."""
LN_2 = 0.6931471805599453


def log1mexp(x: Tensor) -> Tensor:
    """log(1 - exp(x)) for x < 0, same shape (Maechler 2012, "Accurately computing log(1 - exp(-|a|))").

    log(-expm1(x)) above -log 2 and log1p(-exp(x)) below: each loses digits where the other does not.
    """
    near_zero = x > -LN_2
    # Each branch gets -1 at elements where the other branch is selected: its gradient there could be infinite.
    return torch.where(
        near_zero, torch.log(-torch.expm1(x.where(near_zero, -1.0))), torch.log1p(-torch.exp(x.where(~near_zero, -1.0)))
    )


def log_odds(logprob: Tensor) -> Tensor:
    """log(p / (1 - p)) from log p <= 0, same shape; finite, with a finite gradient that is nowhere zero.

    log p is bounded to at most :data:`CLOSEST`; the gradient passes through the bound.
    """
    bounded = logprob.detach().clamp(max=CLOSEST) + (logprob - logprob.detach())
    return bounded - log1mexp(bounded)
