"""KL to the reference as an additional term of any loss."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rlhf.interfaces.loss import Loss
from rlhf.ops.reduce import LEVEL
from rlhf.types import Annotation, Head, LossOutput, OnlineShape, Reduce

from rlhf_algorithms.kl import Estimator, kl_estimate
from rlhf_algorithms.ratios import token_ratio

if TYPE_CHECKING:
    from rlhf.ops.batch import Batch
    from rlhf.ops.losses import LossInput


class WithKL(Loss):
    """``inner`` + ``x.coef["kl"]`` times the KL estimate per token; reads the column ``ref_logprobs``.

    The KL term is averaged like the first term of ``inner``, or by ``token_mean`` if that term is not per token. Every
    update carries the coefficient, so it may be adaptive. ``kl_reference`` is reported without the coefficient.

    ``unbiased``: the estimate of a token times rho = exp(lp - lp_old), with gradient (DeepSeek-V3.2, arXiv:2512.02556,
    section 3.1). For k3 the gradient of a term becomes rho d times that of lp, in expectation the KL's own. Deviations:
    (1) rho is of the token under losses with one ratio per answer too, and its log is bounded to +-20.
    """

    def __init__(self, inner: Loss, estimator: Estimator, unbiased: bool = False) -> None:
        self.inner, self.estimator, self.config = inner, estimator, inner.config
        self.unbiased = unbiased
        self.name = inner.name  # type: ignore[misc]  # errors name the loss that the user chose
        self.correction_option = inner.correction_option

    @property
    def generator_logprobs(self) -> bool:
        return self.inner.generator_logprobs

    def outputs(self) -> tuple[str | Head, ...]:
        outputs = self.inner.outputs()
        return outputs if "logprobs" in outputs else (*outputs, "logprobs")

    def columns(self) -> tuple[str, ...]:
        old = ("old_logprobs",) if self.unbiased else ()
        return tuple(dict.fromkeys((*self.inner.columns(), "ref_logprobs", *old)))

    def reduce(self) -> dict[str, Reduce]:
        terms = self.inner.reduce()
        first = next(iter(terms.values()))
        if LEVEL[first.how] == "tok":
            return {**terms, "kl": Reduce(first.how, over=first.over, roles=first.roles, constant=first.constant)}
        return {**terms, "kl": Reduce("token_mean", over=first.over, roles=first.roles)}

    def misfits(self, shape: OnlineShape) -> list[str]:
        return self.inner.misfits(shape)

    def prepass(self) -> tuple[Annotation, ...]:
        return self.inner.prepass()

    def prepare(self, batch: Batch) -> Batch:
        return self.inner.prepare(batch)

    def __call__(self, x: LossInput) -> LossOutput:
        result = self.inner(x)
        kl_A = kl_estimate(x["logprobs"], x["ref_logprobs"], self.estimator)
        weighted_A = token_ratio(x["logprobs"], x["old_logprobs"]) * kl_A if self.unbiased else kl_A
        terms = {**result.terms, "kl": x.coef["kl"] * weighted_A}
        return LossOutput(terms, {**result.metrics, "kl_reference": ("token", kl_A)})

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.inner.load_state_dict(state)
