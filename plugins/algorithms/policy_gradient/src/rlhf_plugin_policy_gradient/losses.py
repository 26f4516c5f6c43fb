"""Policy losses: the surrogate of each; everything else is in ``policy_loss``."""

from __future__ import annotations

from typing import Any, Literal, Self

import torch
from pydantic import Field, model_validator
from rlhf_algorithms.ratios import bounded, clipped_surrogate, token_ratio
from torch import Tensor

from rlhf_plugin_policy_gradient.policy_loss import Metrics, PolicyLoss, PolicyLossConfig


class PPOConfig(PolicyLossConfig):
    clip_low: float = Field(default=0.2, ge=0, le=1)
    """The ratio's clip range is [1 - clip_low, 1 + clip_high]."""
    clip_high: float = Field(default=0.2, ge=0)
    """Larger than clip_low: clip-higher."""
    dual_clip: float | None = Field(default=None, gt=1)
    """Bounds the loss of tokens with a negative advantage at this many times the advantage."""


class PPO(PolicyLoss):
    """-min(rho A, clip(rho, 1 - low, 1 + high) A) per token."""

    name = "ppo"
    source = "Schulman et al. 2017, Proximal policy optimization, arXiv:1707.06347"
    Config = PPOConfig

    def surrogate(self, x: Any) -> tuple[Tensor, Metrics]:
        c, ratio_A = self.config, token_ratio(x["logprobs"], x["old_logprobs"])
        values_A, clipped_A = clipped_surrogate(ratio_A, x["advantages"], c.clip_low, c.clip_high, c.dual_clip)
        return values_A, {"clip_fraction": ("token", clipped_A.float()), "ratio": ("token", ratio_A)}


class ReinforceLoss(PolicyLoss):
    """-A log pi per token: the plain policy gradient. Unbiased for one optimizer step per rollout batch; later steps
    train on samples of an earlier policy without an importance ratio."""

    name = "reinforce"
    source = "Williams 1992, Simple statistical gradient-following algorithms"
    reads_old = False

    def surrogate(self, x: Any) -> tuple[Tensor, Metrics]:
        return -x["advantages"] * x["logprobs"], {}


class GSPOConfig(PolicyLossConfig):
    aggregation: Literal["seq_mean_token_mean", "seq_mean_token_sum"] = "seq_mean_token_mean"
    """The mean over answers is part of the definition; ``seq_mean_token_sum`` weighs each by its length, which is LUSPO
    (arXiv:2602.05261)."""
    clip_low: float = Field(default=3e-4, ge=0, le=1)
    """Clip of the sequence ratio. That ratio averages over tokens, so its clip is orders of magnitude below a token's.
    """
    clip_high: float = Field(default=4e-4, ge=0)
    """See clip_low."""


class GSPO(PolicyLoss):
    """The surrogate with one ratio per answer, s = exp(mean_t (lp - lp_old)), then the mean over answers.

    Deviations: (1) s multiplies each token's own advantage before the mean over tokens (the paper has one advantage
    per answer, where both are equal). (2) The mean log-ratio is bounded to +-20.
    """

    name = "gspo"
    source = "Zheng et al. 2025, Group sequence policy optimization, arXiv:2507.18071"
    Config = GSPOConfig

    def surrogate(self, x: Any) -> tuple[Tensor, Metrics]:
        c = self.config
        ratio_S = bounded(x.mean_per_sequence(x["logprobs"].float() - x["old_logprobs"].float())).exp()
        values_A, clipped_A = clipped_surrogate(x.to_tokens(ratio_S), x["advantages"], c.clip_low, c.clip_high)
        return values_A, {"clip_fraction": ("token", clipped_A.float()), "ratio": ("sequence", ratio_S)}


class CISPOConfig(PolicyLossConfig):
    clip_low: float = Field(default=1.0, ge=0, le=1)
    """The weight's range is [1 - clip_low, 1 + clip_high]; 1 = no lower bound, as in the paper."""
    clip_high: float = Field(default=4.0, ge=0)
    """See clip_low."""

    @model_validator(mode="after")
    def _some_range(self) -> Self:
        if self.clip_low == 0 and self.clip_high == 0:
            raise ValueError("clip_low = clip_high = 0 makes every weight 1; use the loss 'reinforce' for that")
        return self


class CISPO(PolicyLoss):
    """-stop(clip(rho, 1 - low, 1 + high)) A log pi: clipping bounds the weight; clipped tokens keep a gradient."""

    name = "cispo"
    source = "MiniMax 2025, MiniMax-M1, arXiv:2506.13585"
    Config = CISPOConfig

    def surrogate(self, x: Any) -> tuple[Tensor, Metrics]:
        c = self.config
        ratio_A = token_ratio(x["logprobs"].detach(), x["old_logprobs"])
        weight_A = ratio_A.clamp(1 - c.clip_low, 1 + c.clip_high)
        metrics: Metrics = {"clip_fraction": ("token", (weight_A != ratio_A).float()), "ratio": ("token", ratio_A)}
        return -weight_A * x["advantages"] * x["logprobs"], metrics


class SAPOConfig(PolicyLossConfig):
    aggregation: Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_sum_constant"] = (
        "seq_mean_token_mean"
    )
    """As in the paper, the mean over an answer's tokens first."""
    tau_positive: float = Field(default=1.0, gt=0)
    """How steeply the gate closes for tokens of a positive advantage; larger is nearer to a clip."""
    tau_negative: float = Field(default=1.05, gt=0)
    """The same for all other tokens. Larger than ``tau_positive``, because their gradients also raise the probability
    of tokens that were not sampled."""


class SAPO(PolicyLoss):
    """-(4 / tau) s(tau (rho - 1)) A per token, s the logistic function: a soft gate in place of the clip. Its gradient
    is that of rho A at rho = 1 and fades on both sides; tau depends on the sign of A.

    Deviations: (1) A = 0 takes ``tau_negative``; its loss is 0 in any case. (2) The log-ratio is bounded to +-20, where
    the gate is closed.
    """

    name = "sapo"
    source = "Gao et al. 2025, Soft adaptive policy optimization, arXiv:2511.20347"
    Config = SAPOConfig

    def surrogate(self, x: Any) -> tuple[Tensor, Metrics]:
        c, advantages_A = self.config, x["advantages"]
        ratio_A = token_ratio(x["logprobs"], x["old_logprobs"])
        tau_A = torch.where(advantages_A > 0, c.tau_positive, c.tau_negative)
        share_A = torch.sigmoid(tau_A * (ratio_A - 1))
        metrics: Metrics = {"gate": ("token", 4 * share_A * (1 - share_A)), "ratio": ("token", ratio_A)}
        return -4 / tau_A * share_A * advantages_A, metrics
