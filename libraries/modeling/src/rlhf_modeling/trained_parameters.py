"""Which parameters of a role's model are trained."""

from __future__ import annotations

from rlhf.interfaces import ModelSpec
from torch import nn

from rlhf_modeling.adapters import train_adapters_only
from rlhf_modeling.config import TrainingConfig
from rlhf_modeling.images.architecture import vision_parameters
from rlhf_modeling.loaded import LoadedModel


def choose_parameters(loaded: LoadedModel, spec: ModelSpec, config: TrainingConfig) -> dict[str, nn.Parameter]:
    """Set ``requires_grad`` of every parameter. Returns {name: trained parameter}; of a frozen role, all parameters."""
    module, trained = loaded.module, spec.role.trained
    module.requires_grad_(trained)
    if trained and config.lora is not None:
        own_head = loaded.head if loaded.kind != "lm" else None
        train_adapters_only(module, own_head, config.lora.modules_to_save)
    if trained and config.freeze_vision:
        for name in vision_parameters(module):
            module.get_parameter(name).requires_grad_(False)
    return {name: p for name, p in module.named_parameters() if p.requires_grad or not trained}
