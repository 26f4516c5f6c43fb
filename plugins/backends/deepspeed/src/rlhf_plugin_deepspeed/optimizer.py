"""The optimizer of a role's parameters: decay groups by the shapes that they have when they are whole."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from rlhf_plugin_deepspeed.config import DeepSpeedTrainerConfig
from rlhf_plugin_deepspeed.muon import OrthogonalAdamW


def build_optimizer(
    parameters: Mapping[str, nn.Parameter],
    shapes: Mapping[str, torch.Size],
    outside: set[int],
    config: DeepSpeedTrainerConfig,
) -> torch.optim.AdamW:
    """AdamW or, where chosen, Muon for matrices and AdamW for the rest; matrices decay, vectors (norms, biases) do not.

    Args:
        outside: ids of the parameters of embeddings and heads, whose matrices stay with AdamW.
    """
    size = {name: len(shapes[name]) for name in parameters}
    muon = config.optimizer == "muon"
    chosen = [n for n, p in parameters.items() if muon and size[n] == 2 and id(p) not in outside]
    rest = [n for n in parameters if n not in set(chosen)]
    peak = config.lr if config.muon_lr is None else config.muon_lr
    kinds: list[tuple[list[str], dict[str, Any]]] = [
        (chosen, {"weight_decay": config.weight_decay, "muon": True, "peak": peak, "momentum": config.muon_momentum}),
        ([n for n in rest if size[n] >= 2], {"weight_decay": config.weight_decay}),
        ([n for n in rest if size[n] < 2], {"weight_decay": 0.0}),
    ]
    groups = [{"params": [parameters[n] for n in names], **facts} for names, facts in kinds if names]
    make = OrthogonalAdamW if muon else torch.optim.AdamW
    return make(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)
