"""The implicit reward of an answer under AlphaPO."""

from __future__ import annotations

import math

import torch
from torch import Tensor

EXP_BOUND = 20.0
"""Largest argument of exp; e^20 = 4.9e8."""


def shaped(logprob: Tensor, alpha: float) -> Tensor:
    """(1 - p^-alpha) / alpha from log p, same shape; log p where alpha is 0, which is the limit.

    Gupta et al. 2025 (AlphaPO), arXiv:2501.03884. Deviation: where -alpha log p is above ``EXP_BOUND`` the exponential
    goes on along its tangent, so that value and gradient are finite and the gradient does not vanish.
    """
    if alpha == 0:
        return logprob
    exponent = -alpha * logprob
    inside, beyond = exponent.clamp(max=EXP_BOUND), torch.relu(exponent - EXP_BOUND)
    return -(torch.expm1(inside) + math.exp(EXP_BOUND) * beyond) / alpha
