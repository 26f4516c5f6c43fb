"""The CPO loss: a contrastive loss of the answers' log-probs, and the chosen answers' likelihood."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import Field, model_validator
from rlhf.interfaces import ComponentConfig, Loss
from rlhf.types import LossOutput, Reduce

if TYPE_CHECKING:
    from rlhf.ops.losses import LossInput


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
    over the answers' sums, as the paper writes it."""

    @model_validator(mode="after")
    def _idle(self) -> Self:
        """Refuse options that have no effect."""
        idle = {
            "label_smoothing": self.loss_type not in ("sigmoid", "simpo") and f"loss_type = {self.loss_type!r}",
            "gamma": self.loss_type != "simpo" and f"loss_type = {self.loss_type!r}",
            "nll_reduce": self.nll_coef == 0 and "nll_coef = 0",
        }
        for option, why in idle.items():
            value, default = getattr(self, option), type(self).model_fields[option].default
            if why and value != default:
                raise ValueError(f"{option} = {value!r} has no effect with {why}; leave it at {default!r}")
        return self


class CPOLoss(Loss):
    """-log sigma(beta (lp_chosen - lp_rejected)) - nll_coef x lp_chosen (Xu et al. 2024, eq. 3), or another form.

    Terms: ``cpo``, the mean over pairs, and ``nll`` (times its coefficient). Metrics: ``accuracy``, ``reward_margin``,
    ``chosen_reward`` and ``rejected_reward`` of the rewards beta x (shaped) log-prob; ``chosen_logprobs`` and
    ``rejected_logprobs``, sums or means over tokens as the loss type has it.

    Deviations: (1) By default the likelihood is averaged over tokens, as in TRL; the paper's is ``seq_mean_token_sum``.
    (2) All means are over the optimizer batch. (3) AlphaPO's exponential is bounded (:mod:`rlhf_plugin_cpo.rewards`).
    """

    name = "cpo"
    source = "Xu et al. 2024, arXiv:2401.08417, equation 3; AlphaPO: Gupta et al. 2025, arXiv:2501.03884"
    Config = CPOConfig
    conformance = {"data": "pairs"}

    def outputs(self) -> tuple[str, ...]:
        return ("logprobs",)

    def reduce(self) -> dict[str, Reduce]:
        terms = {"cpo": Reduce("unit_mean")}
        if self.config.nll_coef:
            terms["nll"] = Reduce(self.config.nll_reduce, roles=(0,), coef=self.config.nll_coef)
        return terms

    def __call__(self, x: LossInput) -> LossOutput:
        from rlhf_algorithms.pairs import pair_metrics

        from rlhf_plugin_cpo.rewards import shaped

        c, logprobs_A = self.config, x["logprobs"]
        mean = c.loss_type in ("ipo", "simpo")
        logprob_S = x.mean_per_sequence(logprobs_A) if mean else x.sum_per_sequence(logprobs_A)
        chosen_U, rejected_U = x.of_role(logprob_S, 0), x.of_role(logprob_S, 1)
        chosen_reward_U, rejected_reward_U = shaped(chosen_U, c.alpha), shaped(rejected_U, c.alpha)
        terms = {"cpo": self._contrast(chosen_reward_U - rejected_reward_U)}
        if c.nll_coef:
            terms["nll"] = -logprobs_A
        metrics = pair_metrics(c.beta * chosen_reward_U, c.beta * rejected_reward_U)
        metrics |= {"chosen_logprobs": ("unit", chosen_U), "rejected_logprobs": ("unit", rejected_U)}
        return LossOutput(terms, metrics)

    def _contrast(self, difference_U: Any) -> Any:
        from rlhf_algorithms.pairs import hinge_loss, logistic_loss

        c = self.config
        if c.loss_type == "ipo":
            return (difference_U - 1 / (2 * c.beta)).square()
        if c.loss_type == "hinge":
            return hinge_loss(c.beta * difference_U)
        gamma = c.gamma if c.loss_type == "simpo" else 0.0
        return logistic_loss(c.beta * difference_U - gamma, c.label_smoothing)
