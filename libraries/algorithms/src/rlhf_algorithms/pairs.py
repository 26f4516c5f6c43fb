"""Pairs of answers to one prompt: losses of a margin, and metrics of pairs.

Columns of the batch that :class:`~rlhf_algorithms.pair_learning.PairLearning` makes, before any annotation:

=============  =====  ===================================================================================
``loss_mask``  token  bool, the token is trained on: tokens of the answers, as ``data.loss_on`` says
``margin``     unit   float64, the row's value in the column that ``data.margin`` names; absent without it
=============  =====  ===================================================================================

Each unit has two sequences, whose roles are in ``Batch.role_B``: 0 is chosen, 1 rejected. Other columns of the rows are
in ``Example.row``: an algorithm that needs them overrides ``assemble``. The batch has log-probs of a reference if
``annotations`` asks for them, in the column that it names (``ref_logprobs``).

Shape suffixes: U units (a chosen sequence of role 0 and a rejected one of role 1 each).
"""

from __future__ import annotations

from typing import Any

import torch
from rlhf.types import Level
from torch import Tensor
from torch.nn import functional


def logistic_loss(margin_U: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """-(1 - e) log sigmoid(m) - e log sigmoid(-m), same shape; finite for any finite margin.

    e is the assumed share of pairs whose labels are swapped. The minimum is at m = log((1 - e) / e).
    """
    loss_U = -(1 - label_smoothing) * functional.logsigmoid(margin_U)
    return loss_U - label_smoothing * functional.logsigmoid(-margin_U) if label_smoothing else loss_U


def hinge_loss(margin_U: Tensor) -> Tensor:
    """max(0, 1 - m), same shape (Zhao et al. 2023, SLiC-HF, arXiv:2305.10425, with a margin of 1)."""
    return torch.relu(1 - margin_U)


def pair_metrics(chosen_reward_U: Tensor, rejected_reward_U: Tensor) -> dict[str, tuple[Level, Any]]:
    """Metrics of the implicit rewards of each pair: ``accuracy`` (the chosen reward is larger; a tie counts as one
    half), ``reward_margin``, ``chosen_reward`` and ``rejected_reward``."""
    return {
        "accuracy": ("unit", (1 + (chosen_reward_U - rejected_reward_U).sign()) / 2),
        "reward_margin": ("unit", chosen_reward_U - rejected_reward_U),
        "chosen_reward": ("unit", chosen_reward_U),
        "rejected_reward": ("unit", rejected_reward_U),
    }
