"""The optimizer of a role's parameters, which may be divided over ranks."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import nn

from rlhf_modeling.config import TrainingConfig
from rlhf_modeling.optimizer import parameter_groups
from rlhf_modeling.sharded.muon import DividedOrthogonalAdamW


def build_optimizer(
    parameters: Mapping[str, nn.Parameter],
    shapes: Mapping[str, torch.Size],
    outside: Collection[int],
    config: TrainingConfig,
) -> torch.optim.AdamW:
    """The optimizer of the trainer ``torch``, over the same groups, with Muon's step for divided matrices.

    Args:
        shapes: of whole parameters.
        outside: ids of the parameters of embeddings and heads, whose matrices stay with AdamW.
    """
    make = DividedOrthogonalAdamW if config.optimizer == "muon" else torch.optim.AdamW
    groups = parameter_groups(parameters, shapes, outside, config)
    return make(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)
