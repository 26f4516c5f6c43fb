"""Losses for the trainer suite's checks of gradients. They belong to no algorithm."""

from __future__ import annotations

from dataclasses import replace

import torch
from rlhf.interfaces.loss import Loss
from rlhf.ops.heads import LOGPROBS, OutputHead
from rlhf.ops.losses import LossInput
from rlhf.types import Head, LossOutput, Reduce


def _margin(
    logits_CV: torch.Tensor, ids_C: torch.Tensor, columns: dict[str, torch.Tensor], constants: object
) -> torch.Tensor:
    return logits_CV[:, 1] - columns["targets"]


MARGIN = Head("margin", _margin, position="at", columns=("targets",))
"""A head that is read *after* each token and reads a batch column."""


class TokenLoss(Loss):
    """Three terms with different reductions, over log-probs, entropy and the head :data:`MARGIN`."""

    name = "suite_tokens"

    def outputs(self) -> tuple[str | Head, ...]:
        return ("logprobs", "entropy", MARGIN)

    def columns(self) -> tuple[str, ...]:
        return ("targets",)

    def reduce(self) -> dict[str, Reduce]:
        return {
            "ratio": Reduce("seq_mean_token_mean"),
            "entropy": Reduce("token_mean", coef=-0.1),
            "margin": Reduce("token_mean", coef=0.01),
        }

    def __call__(self, x: LossInput) -> LossOutput:
        logprobs = x["logprobs"]
        terms = {"ratio": -logprobs * x["targets"], "entropy": x["entropy"], "margin": x["margin"].square()}
        return LossOutput(terms, {"nll": ("token", -logprobs)})


CONTEXT = replace(LOGPROBS, name="context_logprobs", over="context_mask")


class ContextLoss(TokenLoss):
    """Adds a term over tokens that no other term reads. Its number of tokens differs, and is 0 in some
    micro-batches."""

    name = "suite_context"

    def outputs(self) -> tuple[str | Head, ...]:
        return (*super().outputs(), CONTEXT)

    def reduce(self) -> dict[str, Reduce]:
        return {**super().reduce(), "context": Reduce("token_mean", over=CONTEXT.over, coef=0.5)}

    def __call__(self, x: LossInput) -> LossOutput:
        result = super().__call__(x)
        nll = -x[CONTEXT.name]
        return LossOutput({**result.terms, "context": nll}, {**result.metrics, "context_nll": (CONTEXT.over, nll)})


class ValueLoss(Loss):
    """Squared distance of a scalar head's values."""

    name = "suite_values"

    def outputs(self) -> tuple[str | Head, ...]:
        return ("values",)

    def columns(self) -> tuple[str, ...]:
        return ("targets",)

    def reduce(self) -> dict[str, Reduce]:
        return {"value": Reduce("token_mean")}

    def __call__(self, x: LossInput) -> LossOutput:
        return LossOutput({"value": (x["values"] - x["targets"]).square()})


def _cross_entropy(
    logits_CV: torch.Tensor, ids_C: torch.Tensor, columns: dict[str, torch.Tensor], constants: dict[str, OutputHead]
) -> torch.Tensor:
    lent_CV = constants["lender"].logits(columns["lent_hidden"])
    shared = lent_CV.shape[1]
    return -(lent_CV.softmax(1) * logits_CV[:, :shared].log_softmax(1)).sum(1)


class LentLoss(Loss):
    """Cross-entropy to the role ``lender``, whose hidden states come as the column ``lent_hidden``."""

    name = "suite_lent"

    def outputs(self) -> tuple[str | Head, ...]:
        return (Head("cross_entropy", _cross_entropy, columns=("lent_hidden",), lenders=("lender",)),)

    def reduce(self) -> dict[str, Reduce]:
        return {"cross_entropy": Reduce("token_mean")}

    def __call__(self, x: LossInput) -> LossOutput:
        return LossOutput({"cross_entropy": x["cross_entropy"]})


class ScoreLoss(Loss):
    """One score per sequence."""

    name = "suite_scores"

    def outputs(self) -> tuple[str | Head, ...]:
        return ("scores",)

    def reduce(self) -> dict[str, Reduce]:
        return {"score": Reduce("seq_mean")}

    def __call__(self, x: LossInput) -> LossOutput:
        return LossOutput({"score": (x["scores"] - 1.0).square()})


class InfiniteLoss(TokenLoss):
    """A loss that is not finite."""

    name = "suite_infinite"

    def __call__(self, x: LossInput) -> LossOutput:
        result = super().__call__(x)
        return LossOutput({**result.terms, "ratio": result.terms["ratio"] * float("inf")})


class InfiniteGradient(TokenLoss):
    """A finite loss with an infinite gradient: the square root at zero."""

    name = "suite_infinite_gradient"

    def __call__(self, x: LossInput) -> LossOutput:
        result = super().__call__(x)
        kink = (x["logprobs"] - x["logprobs"].detach()).sqrt()
        return LossOutput({**result.terms, "ratio": result.terms["ratio"] + kink})
