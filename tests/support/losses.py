"""Small losses for tests that need some loss. They belong to no algorithm; those of the trainer suite stand in
:mod:`rlhf_testing.suite_losses`."""

from __future__ import annotations

import torch
from rlhf.interfaces.loss import Loss
from rlhf.ops.losses import LossInput
from rlhf.types import LossOutput, Reduce


class NllLoss(Loss):
    """Mean negative log-prob."""

    name = "nll"

    def outputs(self) -> tuple[str, ...]:
        return ("logprobs",)

    def reduce(self) -> dict[str, Reduce]:
        return {"nll": Reduce("token_mean")}

    def __call__(self, x: LossInput) -> LossOutput:
        return LossOutput({"nll": -x["logprobs"]})


class SquaresLoss(Loss):
    """Squared distance of log-probs or values from 1."""

    name = "squares"

    def __init__(self, output: str = "values") -> None:
        super().__init__()
        self.output = output

    def outputs(self) -> tuple[str, ...]:
        return (self.output,)

    def reduce(self) -> dict[str, Reduce]:
        return {"squares": Reduce("token_mean")}

    def __call__(self, x: LossInput) -> LossOutput:
        return LossOutput({"squares": (x[self.output] - 1.0) ** 2})


class SequenceLoss(Loss):
    """Terms of whole sequences and units: a ratio as in GSPO, and the logistic function of a sum as in DPO."""

    name = "suite_sequences"

    def outputs(self) -> tuple[str, ...]:
        return ("logprobs",)

    def columns(self) -> tuple[str, ...]:
        return ("targets",)

    def reduce(self) -> dict[str, Reduce]:
        return {"ratio": Reduce("seq_mean"), "margin": Reduce("seq_mean", coef=0.5)}

    def __call__(self, x: LossInput) -> LossOutput:
        ratio_S = x.mean_per_sequence(x["logprobs"] - x["targets"]).exp()
        margin_S = torch.nn.functional.logsigmoid(0.1 * x.sum_per_sequence(x["logprobs"] - x["targets"]))
        return LossOutput({"ratio": -ratio_S, "margin": -margin_S})
