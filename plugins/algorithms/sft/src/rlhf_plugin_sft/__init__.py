"""Supervised fine-tuning: completions, conversations, continued pre-training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field
from rlhf import hookimpl
from rlhf.interfaces import Algorithm, ComponentConfig, Loss, Slot
from rlhf.types import Head, LossOutput, Reduce
from rlhf.types.examples import Example

if TYPE_CHECKING:
    from rlhf.ops.batch import Batch
    from rlhf.ops.losses import LossInput
    from torch import Tensor


def _mean_logprob(logits_CV: Tensor, ids_C: Tensor, columns: Any, constants: Any) -> Tensor:
    return logits_CV.mean(1) - logits_CV.logsumexp(1)


MEAN_LOGPROB = Head("mean_logprob", _mean_logprob)
"""Mean over the vocabulary of the log-probs: the term that label smoothing adds."""


class LikelihoodConfig(ComponentConfig):
    reduce: Literal["token_mean", "seq_mean_token_mean"] = "token_mean"
    """``token_mean``: every trained token of the batch counts the same. ``seq_mean_token_mean``: every row does."""


class NLLConfig(LikelihoodConfig):
    label_smoothing: float = Field(default=0.0, ge=0, lt=1)
    """e: the target distribution is 1 - e on the demonstrated token plus e times the uniform distribution over the
    vocabulary (Szegedy et al. 2016, arXiv:1512.00567, section 7)."""


class NLL(Loss):
    """-log p(token), averaged as ``reduce`` says over the whole optimizer batch; with ``label_smoothing`` e
    -(1 - e) log p(token) - e mean_v log p(v) over the V rows of the model's output head.

    Metrics: ``nll``, the mean of -log p(token) whatever ``reduce`` and ``label_smoothing`` say (its exponential is the
    perplexity); ``token_prob``, the mean probability of the demonstrated token; and ``token_accuracy``, the share of
    demonstrated tokens that are the most probable one.
    """

    name = "nll"
    source = "maximum likelihood"
    Config: ClassVar[type[ComponentConfig]] = NLLConfig
    data = "demonstrations"

    def outputs(self) -> tuple[str | Head, ...]:
        return ("logprobs", *((MEAN_LOGPROB,) if self.config.label_smoothing else ()), "top1")

    def reduce(self) -> dict[str, Reduce]:
        return {"nll": Reduce(self.config.reduce)}

    def __call__(self, x: LossInput) -> LossOutput:
        nll_A, e = -x["logprobs"], self.config.label_smoothing
        values_A = (1 - e) * nll_A - e * x["mean_logprob"] if e else nll_A
        return LossOutput({"nll": values_A}, _metrics(nll_A, x["top1"]))


class DFT(Loss):
    """-stop(p) log p per token, p the token's own probability: dynamic fine-tuning. The gradient of the likelihood
    weighs a demonstrated token by 1 / p; the factor p cancels this weight.

    Metrics: those of ``nll``.
    """

    name = "dft"
    source = "Wu et al. 2025, On the generalization of SFT, arXiv:2508.05629, equation 9"
    Config = LikelihoodConfig
    data = "demonstrations"

    def outputs(self) -> tuple[str, ...]:
        return ("logprobs", "top1")

    def reduce(self) -> dict[str, Reduce]:
        return {"dft": Reduce(self.config.reduce)}

    def __call__(self, x: LossInput) -> LossOutput:
        nll_A = -x["logprobs"]
        return LossOutput({"dft": (-nll_A).exp().detach() * nll_A}, _metrics(nll_A, x["top1"]))


def _metrics(nll_A: Tensor, top1_A: Tensor) -> dict[str, Any]:
    return {"nll": ("token", nll_A), "token_prob": ("token", (-nll_A).exp()), "token_accuracy": ("token", top1_A)}


class SFT(Algorithm[Example]):
    """Maximise the likelihood of demonstrations. Each step of the run is one optimizer step over all rows of the step.

    Which tokens are trained on (the last answer, all answers, everything) is decided by ``data.loss_on`` when rows are
    tokenised. Rows without trained tokens are left out; a step without rows trains nothing.
    """

    name = "sft"
    source = "Ouyang et al. 2022, https://arxiv.org/abs/2203.02155, section 3.5"
    data = "demonstrations"
    slots = {"loss": Slot("loss", "nll")}

    def assemble(self, examples: Sequence[Example]) -> tuple[Batch | None, dict[str, float]]:
        from rlhf.ops.rows import pack_rows

        return pack_rows(examples), {}


@hookimpl
def rlhf_register_algorithm() -> list[type[Algorithm]]:
    return [SFT]


@hookimpl
def rlhf_register_loss() -> list[type[Loss]]:
    return [NLL, DFT]
