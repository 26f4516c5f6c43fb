"""ORPO: supervised fine-tuning on chosen answers plus their odds against the rejected ones; no reference model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from pydantic import Field
from rlhf import hookimpl
from rlhf.interfaces import Algorithm, ComponentConfig, Loss, Slot
from rlhf.types import LossOutput, Reduce
from rlhf_algorithms.pair_learning import PairLearning

if TYPE_CHECKING:
    from rlhf.ops.batch import Batch
    from rlhf.ops.losses import LossInput
    from rlhf.types.examples import Example
    from torch import Tensor


TEXT_MASK = "text_mask"
"""Token mask of ``nll_on = "all"``: the tokens of the rejected answer, and all of the chosen sequence except its first
and those that stand for an image."""


class ORPOConfig(ComponentConfig):
    beta: float = Field(default=0.1, ge=0)
    """Coefficient of the odds ratio: lambda of the paper, ``beta`` of TRL."""
    nll_on: Literal["completion", "all"] = "completion"
    """Tokens of the chosen sequence whose likelihood is maximised: the answer's, or with ``all`` also the prompt's (as
    in TRL)."""


class ORPOLoss(Loss):
    """NLL(chosen) + beta x -log sigma(log odds(chosen) - log odds(rejected)) (Hong et al. 2024, eq. 6 and 7).

    odds = P / (1 - P), log P the mean log-prob of an answer's tokens. The likelihood is averaged over tokens, the term
    of the odds over pairs.

    Terms: ``nll`` and ``odds`` (times beta). Metrics: ``accuracy``, ``reward_margin``, ``chosen_reward`` and
    ``rejected_reward`` of the rewards beta x log P; ``chosen_logprobs`` and ``rejected_logprobs`` (log P);
    ``log_odds``, log odds(chosen) - log odds(rejected).

    Deviations: (1) Log P is bounded to at most -1e-6, so that the odds are finite; the gradient passes through the
    bound. (2) The means are over the optimizer batch.
    """

    name = "orpo"
    source = "Hong et al. 2024, arXiv:2403.07691, equations 6 and 7"
    Config = ORPOConfig
    data = "pairs"

    def outputs(self) -> tuple[str, ...]:
        return ("logprobs",)

    def columns(self) -> tuple[str, ...]:
        return () if self.config.nll_on == "completion" else ("loss_mask",)

    def reduce(self) -> dict[str, Reduce]:
        over = "loss_mask" if self.config.nll_on == "completion" else TEXT_MASK
        return {
            "nll": Reduce("token_mean", over, roles=(0,)),
            "odds": Reduce("unit_mean", over, coef=self.config.beta),
        }

    def __call__(self, x: LossInput) -> LossOutput:
        from rlhf_algorithms.pairs import logistic_loss, pair_metrics

        logprobs_A, beta = x["logprobs"], self.config.beta
        if self.config.nll_on == "completion":
            mean_S = x.mean_per_sequence(logprobs_A)
        else:
            # The tokens of x are those of TEXT_MASK, with prompts; the odds are those of answers.
            answer_A = x["loss_mask"].to(logprobs_A.dtype)
            mean_S = x.sum_per_sequence(logprobs_A * answer_A) / x.sum_per_sequence(answer_A).clamp(min=1)
        chosen_U, rejected_U = x.of_role(mean_S, 0), x.of_role(mean_S, 1)
        odds_U = log_odds(chosen_U) - log_odds(rejected_U)
        metrics = pair_metrics(beta * chosen_U, beta * rejected_U)
        metrics |= {
            "chosen_logprobs": ("unit", chosen_U),
            "rejected_logprobs": ("unit", rejected_U),
            "log_odds": ("unit", odds_U),
        }
        return LossOutput({"nll": -logprobs_A, "odds": logistic_loss(odds_U)}, metrics)


CLOSEST = -1e-6
"""Upper bound of log-probs. At 0 the odds are infinite; at the bound they are a million to one."""
LN_2 = 0.6931471805599453


def log1mexp(x: Tensor) -> Tensor:
    """log(1 - exp(x)) for x < 0, same shape (Maechler 2012, "Accurately computing log(1 - exp(-|a|))").

    Computed as log(-expm1(x)) above -log 2 and as log1p(-exp(x)) below: each loses digits in the other's range.
    """
    import torch

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


class ORPO(PairLearning):
    """Maximise the likelihood of chosen answers, and their odds against the rejected answers.

    Each step of the run is one optimizer step over all pairs of the step. Pairs in which an answer has no token are
    left out and counted.
    """

    name = "orpo"
    source = "Hong et al. 2024, arXiv:2403.07691"
    slots = {"loss": Slot("loss", "orpo")}

    def assemble(self, examples: Sequence[Example]) -> tuple[Batch | None, dict[str, float]]:
        batch, metrics = super().assemble(examples)
        if batch is None or all(r.over != TEXT_MASK for r in self.parts["loss"].reduce().values()):
            return batch, metrics
        text_N = (batch.position_N > 0) & (batch.role_B == 0)[batch.seq_N] & ~batch.image_N
        return batch.with_column("tok", TEXT_MASK, batch.tok["loss_mask"] | text_N, over=None), metrics


@hookimpl
def rlhf_register_algorithm() -> list[type[Algorithm]]:
    return [ORPO]


@hookimpl
def rlhf_register_loss() -> list[type[Loss]]:
    return [ORPOLoss]
