"""Memory of a rank in each ZeRO stage, for ``rlhf plan``. :mod:`rlhf_plugin_deepspeed.engine` allocates it."""

from __future__ import annotations

from dataclasses import replace

from rlhf.interfaces import ModelSpec
from rlhf.interfaces.memory import ModelSize
from rlhf_modeling.storage import Storage, largest_matrix, whole_storage

from rlhf_plugin_deepspeed.config import DeepSpeedTrainerConfig
from rlhf_plugin_deepspeed.topology import check_parts

FP32 = 4.0
COPIES = {"cpu": 3, "cuda": 1}
"""Copies of a bucket of weights that stage 3 gathers. gloo has a copy of its own and gathers the next bucket early."""


def storage(config: DeepSpeedTrainerConfig, spec: ModelSpec, size: ModelSize, device: str) -> Storage:
    """fp32 weights are stepped in place; only an optimizer on the host has a copy of its own. Weights in bf16 always
    have fp32 masters, divided like the optimizer's state. On a CPU the host's memory is the device's.

    Muon computes one whole matrix per rank at a time: its fp32 momentum, and a few copies on the rank that works on it.
    """
    parts = config.tensor_parallel
    check_parts(spec, parts)
    stage, ranks, host = config.stage, spec.world_size // parts, config.offload_optimizer != "none"
    trained, on_cpu, muon = spec.role.trained, device == "cpu", config.optimizer == "muon"
    own, bf16 = whole_storage(config, device, size, spec.storage), spec.storage == "bf16"
    over = ranks if stage >= 1 else 1
    held = replace(
        own,
        layer_ranks=parts,
        frees_gradients=False,
        optimizer_ranks=over,
        optimizer_bytes=own.optimizer_bytes + (FP32 if host and not bf16 else 0.0),
        step=int(FP32 * size.matrices / over) + (spec.world_size + 2) * largest_matrix(size) if muon else 0,
        host_optimizer=host and not on_cpu,
        offloads=device == "cuda" and not host,
        making_bytes=_making(stage, ranks, on_cpu, host, own.weight_bytes),
        buffers=int(config.bucket * FP32) if trained and (ranks > 1 or stage >= 1) else 0,
    )
    if stage == 1:  # whole gradients, then this rank's part twice: reduced, and flattened for the step
        return replace(held, gradient_bytes=max(FP32, 2 * FP32 / ranks))
    if stage == 2:  # this rank's part of the last micro-batch, and of the sum of those before it
        return replace(held, gradient_ranks=ranks, gradient_bytes=2 * FP32)
    if stage == 3:  # a gradient buffer that stays
        copied = config.bucket * COPIES[device] if ranks > 1 else 0
        whole = min(size.parameters, config.gathered + size.widest)
        return replace(
            held,
            weight_ranks=ranks,
            read_bytes=FP32,  # rounded afterwards (:mod:`rlhf_plugin_deepspeed.loading`)
            gradient_ranks=ranks,
            keeps_gradients=True,
            second_ranks=config.hpz_partition_size if config.hpz_partition_size > 1 else 0,
            host_weights=config.offload_params != "none" and not on_cpu,
            gathered=int((whole + copied) * own.weight_bytes) if ranks > 1 or config.offload_params != "none" else 0,
        )
    return held


def _making(stage: int, ranks: int, on_cpu: bool, host: bool, weight: float) -> float:
    """Bytes per trained parameter that exist only while the engine is made. Stages 1 and 2 copy the weights into one
    buffer (on a GPU by way of the host) and this rank's part for the optimizer; stage 3 copies its part. An optimizer
    on the host has copies of its own."""
    part = FP32 / ranks
    if stage in (1, 2):
        return weight + (part if host else 0) if on_cpu else part
    if stage == 3:
        return part * (3 if host and on_cpu else 1)
    return 0.0
