"""KL estimators of a policy against its reference, per token; the controller of their coefficient; the loss term.

With d = log pi(token) - log pi_ref(token) for tokens sampled from pi (Schulman, "Approximating KL divergence", 2020):
k1 = d,  k2 = d^2/2,  k3 = exp(-d) - 1 + d.

Deviations: (1) beyond -d = ``EXP_BOUND`` k3 continues along its tangent. So values and gradients are finite for |d| up
to 1e4, and the gradient does not vanish where the difference is largest, as it would if the result were clamped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from rlhf.errors import TrainingError
from rlhf.interfaces.loss import Loss
from rlhf.ops.reduce import LEVEL
from rlhf.types import Annotation, Head, LossOutput, OnlineShape, Reduce
from torch import Tensor

from rlhf_algorithms.ratios import clip, token_ratio

if TYPE_CHECKING:
    from rlhf.ops.batch import Batch
    from rlhf.ops.losses import LossInput

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
    # expm1, because exp(-d) - 1 loses the digits of small differences.
    exponent, excess = clip(-d, -math.inf, EXP_BOUND), torch.relu(-d - EXP_BOUND)
    return torch.expm1(exponent) + math.exp(EXP_BOUND) * excess + d


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
                    f"adaptive KL: a batch of {n} trajectories against a horizon of {self.horizon:g} could make the "
                    f"coefficient negative; the horizon must be above {0.2 * n:g}. Set algorithm.kl.horizon"
                )
            if not math.isfinite(kl):
                raise TrainingError(f"adaptive KL: the measured KL is {kl}; it must be a finite number")
            error = min(max(kl / self.target - 1.0, -0.2), 0.2)
            self.beta *= 1.0 + error * n / self.horizon
        return self.beta

    def state_dict(self) -> dict[str, Any]:
        return {"beta": self.beta}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.beta = float(state["beta"])


class Beside(Loss):
    """``inner`` with an additional term. Everything else is the same as in ``inner``."""

    def __init__(self, inner: Loss) -> None:
        self.inner, self.config = inner, inner.config
        self.name = inner.name  # type: ignore[misc]  # errors name the loss that the user chose
        self.correction_option = inner.correction_option

    @property
    def generator_logprobs(self) -> bool:
        return self.inner.generator_logprobs

    def conflicts(self, shape: OnlineShape) -> list[str]:
        return self.inner.conflicts(shape)

    def prepass(self) -> tuple[Annotation, ...]:
        return self.inner.prepass()

    def prepare(self, batch: Batch) -> Batch:
        return self.inner.prepare(batch)

    def summary(self, means: Mapping[str, float]) -> dict[str, float]:
        return self.inner.summary(means)

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.inner.load_state_dict(state)


class WithKL(Beside):
    """``inner`` + ``x.coef["kl"]`` times the KL estimate per token; reads the column ``ref_logprobs``.

    The KL term is averaged like the first term of ``inner``, or by ``token_mean`` if that term is not per token. The
    coefficient may be adaptive, because every update carries it. ``kl_reference`` is reported without the coefficient.

    ``unbiased``: multiply the estimate of a token by rho = exp(lp - lp_old), with gradient (DeepSeek-V3.2,
    arXiv:2512.02556, section 3.1). For k3 the gradient of a term becomes rho d times the gradient of lp; its
    expectation is the gradient of the KL. Deviations: (1) rho is the token's ratio, also for losses with one ratio per
    answer, and its log is bounded to +-20.
    """

    def __init__(self, inner: Loss, estimator: Estimator, unbiased: bool = False) -> None:
        super().__init__(inner)
        self.estimator, self.unbiased = estimator, unbiased

    def outputs(self) -> tuple[str | Head, ...]:
        outputs = self.inner.outputs()
        return outputs if "logprobs" in outputs else (*outputs, "logprobs")

    def columns(self) -> tuple[str, ...]:
        old = ("old_logprobs",) if self.unbiased else ()
        return tuple(dict.fromkeys((*self.inner.columns(), "ref_logprobs", *old)))

    def reduce(self) -> dict[str, Reduce]:
        terms = self.inner.reduce()
        first = next(iter(terms.values()))
        method = first.method if LEVEL[first.method] == "tok" else "token_mean"
        return {**terms, "kl": replace(first, method=method, coef=1.0)}

    def __call__(self, x: LossInput) -> LossOutput:
        result = self.inner(x)
        kl_A = kl_estimate(x["logprobs"], x["ref_logprobs"], self.estimator)
        weighted_A = token_ratio(x["logprobs"], x["old_logprobs"]) * kl_A if self.unbiased else kl_A
        terms = {**result.terms, "kl": x.coef["kl"] * weighted_A}
        return LossOutput(terms, {**result.metrics, "kl_reference": ("token", kl_A)})
