"""CPO: the log-prob of an answer is its reward, and chosen answers are imitated; no reference model."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal, Self

from pydantic import Field, model_validator
from rlhf import hookimpl
from rlhf.interfaces import Algorithm, ComponentConfig, Loss, Slot
from rlhf_algorithms.pair_learning import ContrastLoss, PairLearning

if TYPE_CHECKING:
    from rlhf.types.losses import How
    from torch import Tensor


class CPOConfig(ComponentConfig):
    beta: float = Field(default=0.1, gt=0)
    """Scale of the reward; for ``ipo`` the strength of its regularisation, tau of that paper."""
    loss_type: Literal["sigmoid", "hinge", "ipo", "simpo"] = "sigmoid"
    """``sigmoid``: -log sigma(beta d), the paper's; ``hinge``: max(0, 1 - beta d); ``ipo``: (d - 1 / (2 beta))^2;
    ``simpo``: -log sigma(beta d - gamma). d is the difference of the answers' log-probs: of their sums over tokens for
    ``sigmoid`` and ``hinge``, of their means for ``ipo`` and ``simpo``."""
    label_smoothing: float = Field(default=0.0, ge=0, lt=0.5)
    """Assumed share of pairs whose labels are swapped (``sigmoid`` and ``simpo`` only)."""
    gamma: float = Field(default=0.5, ge=0)
    """Target margin; read by ``simpo`` only."""
    alpha: float = 0.0
    """Shape of the reward (AlphaPO): (1 - p^-alpha) / alpha instead of log p; 0 = log p."""
    nll_coef: float = Field(default=1.0, ge=0)
    """Coefficient of the chosen answers' negative log-likelihood (``cpo_alpha`` of TRL); 0 = off."""
    nll_reduce: Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum"] = "token_mean"
    """How that likelihood is averaged: over all tokens of the chosen answers; over the answers' means per token; or
    over the answers' sums, as in the paper."""

    @model_validator(mode="after")
    def _idle(self) -> Self:
        """Refuse options that have no effect."""
        idle = {
            "label_smoothing": self.loss_type not in ("sigmoid", "simpo") and f"loss_type = {self.loss_type!r}",
            "gamma": self.loss_type != "simpo" and f"loss_type = {self.loss_type!r}",
            "nll_reduce": self.nll_coef == 0 and "nll_coef = 0",
        }
        for option, setting in idle.items():
            value, default = getattr(self, option), type(self).model_fields[option].default
            if setting and value != default:
                raise ValueError(f"{option} = {value!r} has no effect with {setting}; leave it at {default!r}")
        return self


class CPOLoss(ContrastLoss):
    """-log sigma(beta (lp_chosen - lp_rejected)) - nll_coef x lp_chosen (Xu et al. 2024, eq. 3), or another form.

    Terms: ``cpo``, the mean over pairs, and ``nll`` (times its coefficient). Metrics: ``accuracy``, ``reward_margin``,
    ``chosen_reward`` and ``rejected_reward`` of the rewards beta x (shaped) log-prob; ``chosen_logprobs`` and
    ``rejected_logprobs``, sums or means over tokens, depending on the loss type.

    Deviations: (1) By default the likelihood is averaged over tokens, as in TRL; the paper's is ``seq_mean_token_sum``.
    (2) All means are over the optimizer batch. (3) AlphaPO's exponential is bounded (:func:`shaped`).
    """

    name = "cpo"
    source = "Xu et al. 2024, arXiv:2401.08417, equation 3; AlphaPO: Gupta et al. 2025, arXiv:2501.03884"
    Config = CPOConfig

    @property
    def per_token(self) -> bool:
        return self.config.loss_type in ("ipo", "simpo")

    @property
    def nll_how(self) -> How:
        reduction: How = self.config.nll_reduce
        return reduction

    def shaped(self, logprob_U: Tensor) -> Tensor:
        return shaped(logprob_U, self.config.alpha)

    def contrast(self, difference_U: Tensor) -> Tensor:
        from rlhf_algorithms.pairs import hinge_loss, logistic_loss

        c = self.config
        if c.loss_type == "ipo":
            return (difference_U - 1 / (2 * c.beta)).square()
        if c.loss_type == "hinge":
            return hinge_loss(c.beta * difference_U)
        gamma = c.gamma if c.loss_type == "simpo" else 0.0
        return logistic_loss(c.beta * difference_U - gamma, c.label_smoothing)


EXP_BOUND = 20.0
"""Largest argument of exp in :func:`shaped`; e^20 = 4.9e8."""


def shaped(logprob: Tensor, alpha: float) -> Tensor:
    """(1 - p^-alpha) / alpha from log p, same shape; log p where alpha is 0, which is the limit.

    Gupta et al. 2025 (AlphaPO), arXiv:2501.03884. Deviation: above -alpha log p = ``EXP_BOUND`` the exponential is
    replaced by its tangent, so that value and gradient are finite and the gradient does not vanish.
    """
    import torch
    from rlhf_algorithms.ratios import clip

    if alpha == 0:
        return logprob
    exponent = -alpha * logprob
    clipped_exponent, excess = clip(exponent, -math.inf, EXP_BOUND), torch.relu(exponent - EXP_BOUND)
    return -(torch.expm1(clipped_exponent) + math.exp(EXP_BOUND) * excess) / alpha


class CPO(PairLearning):
    """Raise the chosen answer's log-prob above the rejected one's, and imitate the chosen one.

    Each step of the run is one optimizer step over all pairs of the step. Pairs in which an answer has no token are
    left out and counted.
    """

    name = "cpo"
    source = "Xu et al. 2024, arXiv:2401.08417"
    slots = {"loss": Slot("loss", "cpo")}


@hookimpl
def rlhf_register_algorithm() -> list[type[Algorithm]]:
    return [CPO]


@hookimpl
def rlhf_register_loss() -> list[type[Loss]]:
    return [CPOLoss]
