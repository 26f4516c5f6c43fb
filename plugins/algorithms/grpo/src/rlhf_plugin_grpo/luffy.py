"""LUFFY: groups that contain an expert's answers, and a loss that shapes the probabilities of the expert's tokens."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, Self

import torch
from pydantic import Field, model_validator
from rlhf.interfaces import Slot
from rlhf.ops.losses import LossInput
from rlhf.types import Needs
from rlhf_algorithms.policy_gradient import PolicyGradient
from rlhf_algorithms.policy_gradient_config import PolicyGradientConfig
from rlhf_algorithms.policy_losses import Metrics, PPOConfig, PPOLoss
from torch import Tensor


class LuffyConfig(PolicyGradientConfig):
    demonstrations_per_group: int = Field(default=1, ge=1)
    """Number of samples in each group that are the answer in the data. The policy samples the others."""

    @model_validator(mode="after")
    def _scored(self) -> Self:
        if not self.teacher.task:
            raise ValueError(
                "teacher.task = false does not use the reward, which the answers in the data need; set teacher.task = "
                "true"
            )
        return self


class Luffy(PolicyGradient):
    """Mixed-policy GRPO. In each group the first samples are the data's answer, which comes from an expert. It is
    scored, counts in the group's mean, and is trained on with the shaped loss ``luffy``.

    Every row of ``data.train`` needs an answer (``data.response``). In evaluations the policy samples every answer.
    ``reward/mean`` and ``length/mean`` include the expert's answers.

    Deviations: (1) The sum over tokens is divided by the number of tokens of the optimizer batch, as in ``grpo``; the
    paper divides by that of the group.
    """

    name = "luffy"
    source = "Yan et al. 2025, Learning to reason under off-policy guidance, arXiv:2504.14945"
    Config = LuffyConfig
    slots = PolicyGradient.slots | {
        "advantage": Slot("advantage", "group_norm", {"std": "group"}),
        "loss": Slot("loss", "luffy"),
    }

    def needs(self) -> Needs:
        return replace(super().needs(), demonstrations_per_group=self.config.demonstrations_per_group)


class LuffyLossConfig(PPOConfig):
    gamma: float = Field(default=0.1, gt=0)
    """gamma of the shaping p / (p + gamma). The smaller it is, the more an expert's low-probability tokens count."""


class LuffyLoss(PPOLoss):
    """Tokens of the policy: the loss ``ppo``. Tokens of an answer in the data: -A p / (p + gamma), without a clip,
    where p is the policy's probability of the token and A its advantage.

    The expert's own probabilities are assumed to be 1, so p is the importance ratio. The derivative of p / (p + gamma)
    with respect to log p is gamma p / (p + gamma)^2, which is largest at p = gamma.
    """

    name = "luffy"
    source = "Yan et al. 2025, Learning to reason under off-policy guidance, arXiv:2504.14945"
    Config = LuffyLossConfig

    def columns(self) -> tuple[str, ...]:
        return (*super().columns(), "is_demonstration")

    def surrogate(self, x: LossInput) -> tuple[Tensor, Metrics]:
        values_A, metrics = super().surrogate(x)
        demonstration_A, logprobs_A = x["is_demonstration"][x.unit_A], x["logprobs"].float()
        shaped_A = -x["advantages"] * torch.sigmoid(logprobs_A - math.log(self.config.gamma))  # p / (p + gamma)
        # Ratio and clip mean nothing for the expert's tokens, whose loss does not use them.
        all_metrics: dict[str, Any] = {name: (*metric, ~demonstration_A) for name, metric in metrics.items()}
        all_metrics["demonstration_prob"] = ("token", logprobs_A.detach().exp(), demonstration_A)
        return torch.where(demonstration_A, shaped_A, values_A), all_metrics
