"""What a rank holds in each stage, for ``rlhf plan``; ``engine.py`` is where it comes from."""

from __future__ import annotations

from dataclasses import replace

from rlhf.interfaces import ModelSpec
from rlhf.interfaces.memory import Sharding
from rlhf.modeling.sharding import sharding as of_one_rank

from rlhf_plugin_deepspeed.config import DeepSpeedTrainerConfig
from rlhf_plugin_deepspeed.grid import check_parts

FP32 = 4.0
COPIES = 3
"""Of a bucket of weights that stage 3 gathers over gloo: as it is gathered, gloo's own, and that of the bucket after it
(measured, docs/plan.md)."""


def sharding(config: DeepSpeedTrainerConfig, spec: ModelSpec, device: str) -> Sharding:
    """See :meth:`rlhf.interfaces.Trainer.sharding`. Weights are fp32 and stepped in place: there is no other copy, but
    for an optimizer on the host."""
    parts = config.tensor_parallel
    check_parts(spec, parts)
    stage, ranks, host = config.stage, spec.world_size // parts, config.offload_optimizer != "none"
    held = replace(
        of_one_rank(config, spec, device),
        layer_ranks=parts,
        optimizer_ranks=ranks if stage >= 1 else 1,
        master_bytes=FP32 if host else 0.0,
        flat=stage >= 1,
        host_optimizer=host,
        offloads=device == "cuda" and not host,
        buffers=int(config.bucket * FP32) if ranks > 1 or stage >= 1 else 0,
    )
    if stage == 1:  # whole gradients, then the rank's part twice: gathered up, and flattened for the step
        return replace(held, gradient_bytes=max(FP32, 2 * FP32 / ranks))
    if stage == 2:  # the last micro-batch's part beside what was added up before it
        return replace(held, gradient_ranks=ranks, gradient_bytes=2 * FP32)
    if stage == 3:  # the buffer that stays, and its flattened copy in the step
        return replace(
            held,
            weight_ranks=ranks,
            loading_ranks=ranks,
            gradient_ranks=ranks,
            keeps_gradients=True,
            host_weights=config.offload_params != "none",
            gathered=config.gathered,
            in_flight=config.bucket * (COPIES if device == "cpu" else 1),
            cast_bytes=0.0,  # layers remember their weight, not its cast
            fused=config.kernels == "liger",
        )
    return held
