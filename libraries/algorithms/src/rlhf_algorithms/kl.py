"""KL estimators of a policy against its reference, per token, and the controllers of their coefficient.

With d = log pi(token) - log pi_ref(token) for tokens sampled from pi (Schulman, "Approximating KL divergence", 2020):
k1 = d,  k2 = d^2/2,  k3 = exp(-d) - 1 + d.

Deviations: (1) beyond -d = ``EXP_BOUND`` k3 continues along its tangent. So values and gradients are finite for |d| up
to 1e4, and the gradient does not vanish where the difference is largest, as it would if the result were clamped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from rlhf.errors import TrainingError
from torch import Tensor

Estimator = Literal["k1", "k2", "k3"]

EXP_BOUND = 10.0
"""Largest argument of exp in k3; e^10 = 22026 is far beyond any meaningful estimate."""


def k1(d: Tensor) -> Tensor:
    """Unbiased, can be negative. As a *loss* its expected gradient is zero (the mean score function)."""
    return d


def k2(d: Tensor) -> Tensor:
    """Biased, never negative; its gradient is an unbiased gradient of KL(policy || reference)."""
    return d.square() / 2


def k3(d: Tensor) -> Tensor:
    """Unbiased and never negative; tangent beyond ``EXP_BOUND``."""
    inside, beyond = (-d).clamp(max=EXP_BOUND), (-d - EXP_BOUND).clamp(min=0)
    return torch.expm1(inside) + math.exp(EXP_BOUND) * beyond + d


ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3}


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, estimator: Estimator) -> Tensor:
    """The estimator at every token, float32, same shape; gradient flows into ``logprobs``."""
    return ESTIMATORS[estimator](logprobs.float() - ref_logprobs.float())


class KLController:
    """The coefficient beta: fixed, or adaptive if a target is given (Ziegler et al. 2019, arXiv:1909.08593, 2.2).

    Adaptive: e = clip(kl/target - 1, -0.2, 0.2); beta *= 1 + e N/horizon, where N is the number of trajectories of the
    update. Deviations: (1) ``kl`` is the mean per action token of the configured estimator, so ``target`` is in nats
    per token. (2) An N so large that beta could reach 0 is an error, because beta would then stay 0.
    """

    def __init__(self, coef: float, target: float | None = None, horizon: float = 10_000.0) -> None:
        self.beta, self.target, self.horizon = coef, target, horizon

    @property
    def adaptive(self) -> bool:
        return self.target is not None

    def update(self, kl: float, n: int) -> float:
        """Adapt beta to the KL that was measured on ``n`` trajectories. Returns the new beta."""
        if self.target is not None and n:
            if 0.2 * n >= self.horizon:
                raise TrainingError(
                    f"adaptive KL: a batch of {n} trajectories against a horizon of {self.horizon:g} could turn the "
                    f"coefficient negative; the horizon must be above {0.2 * n:g}. Set algorithm.kl.horizon"
                )
            if not math.isfinite(kl):
                raise TrainingError(f"adaptive KL: the measured KL is {kl}, it must be a finite number")
            error = min(max(kl / self.target - 1.0, -0.2), 0.2)
            self.beta *= 1.0 + error * n / self.horizon
        return self.beta

    def state_dict(self) -> dict[str, Any]:
        return {"beta": self.beta}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.beta = float(state["beta"])
