"""Checks of trainer options that are made before a model is loaded."""

from __future__ import annotations

import importlib.util

from rlhf.errors import ConfigError
from rlhf.interfaces import ModelSpec

from rlhf_modeling.config import TrainingConfig
from rlhf_modeling.flash_attention import check_kernel
from rlhf_modeling.kernels import check_kernels
from rlhf_modeling.precision import choose_device, choose_precision
from rlhf_modeling.schedule import Schedule
from rlhf_modeling.skeleton import check_model

LEARNING = frozenset(
    {
        "lr", "betas", "eps", "weight_decay", "max_grad_norm", "schedule", "warmup_steps", "warmup_ratio",
        "min_lr_ratio", "decay_ratio", "ema_decay", "neftune_alpha", "lora", "aux_loss_coef", "optimizer", "muon_lr",
        "muon_momentum",
    }
)  # fmt: skip
"""Training-only options of :class:`TrainingConfig`: a frozen role does not read them."""


def check_training(config: TrainingConfig, spec: ModelSpec, wanted: str, device: str | None) -> None:
    """See :meth:`rlhf.interfaces.Trainer.check`.

    Args:
        wanted: the trainer's option ``device``: ``auto`` | ``cpu`` | ``cuda``.
    """
    if spec.role.trained and spec.total_updates:
        Schedule(config, spec.total_updates)
    check_model(config, spec)
    if device is None:
        return
    on = choose_device(wanted)
    bf16 = choose_precision(spec.dtype, on, spec.on_processor).bf16
    check_kernel(config.attention, on, bf16)
    check_kernels(config.kernels, on.type)
    if spec.role.trained and config.lora is not None and importlib.util.find_spec("peft") is None:
        raise ConfigError("trainer.lora needs peft: pip install 'rlhf-kit[lora]'")
