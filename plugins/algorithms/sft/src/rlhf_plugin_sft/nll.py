"""Negative log-likelihood of the tokens under the loss mask."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from rlhf.interfaces import ComponentConfig, Loss
from rlhf.types import LossOutput, Reduce

if TYPE_CHECKING:
    from rlhf.ops.losses import LossInput


class NLL(Loss):
    """-log p(token), averaged as ``reduce`` says over the whole optimizer batch.

    Metrics: ``nll``, the mean per trained token whatever ``reduce`` says (its exponential is the perplexity), and
    ``token_prob``, the mean probability of the demonstrated token.
    """

    name = "nll"
    source = "maximum likelihood"

    class Config(ComponentConfig):
        reduce: Literal["token_mean", "seq_mean_token_mean"] = "token_mean"
        """``token_mean``: every trained token of the batch counts the same. ``seq_mean_token_mean``: every row does."""

    def outputs(self) -> tuple[str, ...]:
        return ("logprobs",)

    def reduce(self) -> dict[str, Reduce]:
        return {"nll": Reduce(self.config.reduce)}

    def __call__(self, x: LossInput) -> LossOutput:
        nll_A = -x["logprobs"]
        return LossOutput({"nll": nll_A}, {"nll": ("token", nll_A), "token_prob": ("token", (-nll_A).exp())})
