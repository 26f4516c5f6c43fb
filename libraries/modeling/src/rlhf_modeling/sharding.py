"""What a rank of this room's trainers holds, for ``rlhf plan``: a whole fp32 copy; a subclass divides it."""

from __future__ import annotations

from rlhf.interfaces import ModelSpec
from rlhf.interfaces.memory import Sharding

from rlhf_modeling.config import TrainingConfig


def sharding(config: TrainingConfig, spec: ModelSpec, device: str) -> Sharding:
    """See :meth:`rlhf.interfaces.Trainer.sharding`. A GPU that is planned for computes bf16 where nothing else is said;
    a CPU as this one would. Liger's kernels keep for the backward pass what fused layers keep (read, not measured).
    Muon keeps one momentum for matrices; its step of one has it in bf16 a few times."""
    bf16 = computes_bf16(spec.dtype, device)
    return Sharding(
        matrix_bytes=4.0 if config.optimizer == "muon" else None,
        step_matrices=2 if config.optimizer == "muon" else 0,
        average_bytes=4.0 if config.ema_decay is not None else 0.0,
        bf16=bf16,
        cast_bytes=2.0 if bf16 else 0.0,
        fused=config.kernels in ("own", "liger") or (config.kernels == "auto" and device == "cpu"),
        keeps_file=device == "cpu",
        shares_prefixes=config.shared_prefixes and config.neftune_alpha is None,
        offloads=device == "cuda",
        logits=config.logits_chunk,
        micro_tokens=4096 if bf16 else 2048,
        adapter_rank=config.lora.rank if config.lora is not None else 0,
        adapter_targets=config.lora.targets if config.lora is not None else None,
    )


def computes_bf16(dtype: str, device: str) -> bool:
    """``dtype``: ``auto`` | ``fp32`` | ``bf16``."""
    if dtype != "auto":
        return dtype == "bf16"
    if device == "cuda":
        return True
    import torch

    from rlhf_modeling.precision import choose_precision

    return choose_precision("auto", torch.device("cpu")).bf16
