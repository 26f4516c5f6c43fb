"""SimPO: the mean log-prob of an answer is its reward; no reference model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Self

from pydantic import Field, model_validator
from rlhf import hookimpl
from rlhf.interfaces import Algorithm, ComponentConfig, Loss, Slot
from rlhf_algorithms.pair_learning import ContrastLoss, PairLearning

if TYPE_CHECKING:
    from torch import Tensor


class SimPOConfig(ComponentConfig):
    beta: float = Field(default=2.0, gt=0)
    """Scale of the reward, beta x the mean log-prob of an answer's tokens. SimPO uses 2 to 10; losses on sums of
    log-probs use about 0.1."""
    gamma: float = Field(default=0.5, ge=0)
    """Target margin between the two rewards, as in the paper: on the scale of beta x log-prob, not divided by beta."""
    loss_type: Literal["sigmoid", "hinge"] = "sigmoid"
    """``sigmoid``: -log sigma(m), the paper's; ``hinge``: max(0, 1 - m)."""
    label_smoothing: float = Field(default=0.0, ge=0, lt=0.5)
    """Assumed share of pairs whose labels are swapped (``sigmoid`` only)."""
    nll_coef: float = Field(default=0.0, ge=0)
    """Coefficient of the chosen answers' negative log-likelihood, the mean over their tokens; 0 = off."""

    @model_validator(mode="after")
    def _smoothing(self) -> Self:
        if self.label_smoothing and self.loss_type != "sigmoid":
            raise ValueError(
                f"label_smoothing = {self.label_smoothing:g} has no effect with loss_type = {self.loss_type!r}; "
                'set it to 0 or use loss_type = "sigmoid"'
            )
        return self


class SimPOLoss(ContrastLoss):
    """-log sigma(beta (mean lp_chosen - mean lp_rejected) - gamma), the mean over pairs (Meng et al. 2024, eq. 6).

    Terms: ``simpo`` and, with ``nll_coef``, ``nll``. Metrics: ``accuracy``, ``reward_margin``, ``chosen_reward`` and
    ``rejected_reward`` of the rewards beta x mean log-prob (gamma not subtracted); ``chosen_logprobs`` and
    ``rejected_logprobs``, the means per token of an answer.

    Deviations: (1) gamma is defined as in the paper; the authors' code uses gamma / beta. (2) The mean is over all
    pairs of the optimizer batch, and the mean of the likelihood is over all tokens of its chosen answers.
    """

    name = "simpo"
    source = "Meng et al. 2024, arXiv:2405.14734, equation 6"
    Config = SimPOConfig

    def contrast(self, difference_U: Tensor) -> Tensor:
        from rlhf_algorithms.pairs import hinge_loss, logistic_loss

        c = self.config
        margin_U = c.beta * difference_U - c.gamma
        return logistic_loss(margin_U, c.label_smoothing) if c.loss_type == "sigmoid" else hinge_loss(margin_U)


class SimPO(PairLearning):
    """Raise the chosen answer's mean log-prob above the rejected one's by a target margin.

    Each step of the run is one optimizer step over all pairs of the step. Pairs in which an answer has no token are
    left out and counted.
    """

    name = "simpo"
    source = "Meng et al. 2024, arXiv:2405.14734"
    slots = {"loss": Slot("loss", "simpo")}


@hookimpl
def rlhf_register_algorithm() -> list[type[Algorithm]]:
    return [SimPO]


@hookimpl
def rlhf_register_loss() -> list[type[Loss]]:
    return [SimPOLoss]
