"""Checks of trainer options before a model is loaded."""

from __future__ import annotations

import importlib.util

from rlhf.errors import ConfigError
from rlhf.interfaces import ModelSpec

from rlhf_modeling.adapter_check import check_adapter
from rlhf_modeling.config import TrainingConfig
from rlhf_modeling.determinism import prepare_determinism
from rlhf_modeling.flash_attention import check_kernel
from rlhf_modeling.images.architecture import is_image_text, require_images
from rlhf_modeling.kernels import check_kernels
from rlhf_modeling.precision import choose_device, precision_of
from rlhf_modeling.pretrained import read_config
from rlhf_modeling.quantized import require_quantization
from rlhf_modeling.rate_schedule import RateSchedule
from rlhf_modeling.skeleton import check_model
from rlhf_modeling.stored import check_storage

LEARNING = frozenset(
    {
        "lr", "betas", "eps", "weight_decay", "max_grad_norm", "schedule", "warmup_steps", "warmup_ratio",
        "min_lr_ratio", "decay_ratio", "ema_decay", "neftune_alpha", "lora", "aux_loss_coef", "optimizer", "muon_lr",
        "muon_momentum", "export_masters", "freeze_vision", "router_replay", "offload_activations",
    }
)  # fmt: skip
"""Training-only options of :class:`TrainingConfig`: a frozen role does not read them."""


def check_training(config: TrainingConfig, spec: ModelSpec, choice: str, device: str | None) -> None:
    """See :meth:`rlhf.interfaces.Trainer.check`.

    Args:
        choice: the trainer's option ``device``: ``auto`` | ``cpu`` | ``cuda``.
    """
    check_storage(spec)
    if spec.images:
        require_images(spec, read_config(spec))
    if spec.storage == "bf16" and config.kernels == "liger":
        raise ConfigError(
            f"role {spec.role.name!r} has storage = 'bf16' and trainer.kernels = 'liger', which supports only fp32 "
            "weights of norms. Remove one of the two options."
        )
    if config.export_masters and spec.role.trained and spec.storage == "fp32":
        raise ConfigError(
            f"trainer.export_masters: role {spec.role.name!r} is stored in fp32, so its fp32 weights are always "
            "exported. Remove the option, or set it in the trainer section of a role with storage = 'bf16'."
        )
    if config.offload_activations and spec.role.trained and not spec.gradient_checkpointing:
        raise ConfigError(
            "trainer.offload_activations moves the activations that gradient checkpointing keeps, but role "
            f"{spec.role.name!r} has gradient_checkpointing = false. Set it to true in the role's section, or set "
            "offload_activations = false in the role's section of the trainer."
        )
    if config.quantization is not None and spec.role.trained:
        raise ConfigError(
            f"trainer.quantization = {config.quantization!r}: role {spec.role.name!r} is trained, but quantised "
            "weights cannot be trained. Set the option in the trainer section of a frozen role, or train adapters over "
            "quantised weights: trainer.lora.quantization."
        )
    if config.quantization is not None and spec.replaced:
        raise ConfigError(
            f"trainer.quantization = {config.quantization!r}: the algorithm copies other weights to role "
            f"{spec.role.name!r}, but quantised weights cannot be replaced. Remove the option for this role, or remove "
            "the algorithm's option that copies the weights."
        )
    if config.kernels == "liger" and is_image_text(spec):
        raise ConfigError(
            f"trainer.kernels = 'liger' has not been verified for image-text models, but role {spec.role.name!r} has "
            "one. Remove the option."
        )
    if spec.role.trained and spec.total_updates:
        RateSchedule(config, spec.total_updates)  # raises ConfigError if it does not fit the number of updates
    check_adapter(spec, config.lora if spec.role.trained else None)
    check_model(config, spec)
    if device is None:
        return
    on = choose_device(choice)
    bf16 = precision_of(spec, on).bf16
    if config.deterministic:
        prepare_determinism(on)
    check_kernel(config.attention, on, bf16)
    check_kernels(config.kernels, on.type)
    if spec.role.trained and config.lora is not None and importlib.util.find_spec("peft") is None:
        raise ConfigError("trainer.lora needs peft: pip install peft")
    if spec.role.trained and config.lora is not None and config.lora.quantization is not None:
        require_quantization(f"trainer.lora.quantization = {config.lora.quantization!r}", config.lora.quantization, on)
    if config.quantization is not None:
        require_quantization(f"trainer.quantization = {config.quantization!r}", config.quantization, on)
