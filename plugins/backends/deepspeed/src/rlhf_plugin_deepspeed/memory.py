"""What a rank holds in each stage, for ``rlhf plan``; ``engine.py`` is where it comes from."""

from __future__ import annotations

from dataclasses import replace

from rlhf.interfaces import ModelSpec
from rlhf.interfaces.memory import Sharding
from rlhf_modeling.sharding import sharding as of_one_rank

from rlhf_plugin_deepspeed.config import DeepSpeedTrainerConfig
from rlhf_plugin_deepspeed.topology import check_parts

FP32 = 4.0
COPIES = 3
"""Of a bucket of weights that stage 3 gathers over gloo: as it is gathered, gloo's own, and that of the bucket after it
(measured, docs/plan.md)."""


def sharding(config: DeepSpeedTrainerConfig, spec: ModelSpec, device: str) -> Sharding:
    """See :meth:`rlhf.interfaces.Trainer.sharding`. Weights are fp32 and stepped in place: there is no other copy, but
    for an optimizer on the host. On a CPU the host is where everything is.

    Muon keeps one momentum for matrices, and makes the steps of all that the rank has before it puts matrices together,
    one for each rank at a time; the rank's own is in bf16 twice and more meanwhile (:mod:`rlhf_plugin_deepspeed.muon`).
    """
    parts = config.tensor_parallel
    check_parts(spec, parts)
    stage, ranks, host = config.stage, spec.world_size // parts, config.offload_optimizer != "none"
    trained, on_cpu, muon = spec.role.trained, device == "cpu", config.optimizer == "muon"
    held = replace(
        of_one_rank(config, spec, device),
        layer_ranks=parts,
        optimizer_ranks=ranks if stage >= 1 else 1,
        step_bytes=FP32 if muon else 0.0,
        step_matrices=spec.world_size + 2 if muon else 0,
        master_bytes=FP32 if host else 0.0,
        flat=stage >= 1,
        keeps_file=on_cpu and parts == 1 and (stage == 0 or (stage < 3 and not trained)),
        host_optimizer=host and not on_cpu,
        offloads=device == "cuda" and not host,
        making_bytes=_making(stage, ranks, on_cpu, host),
        buffers=int(config.bucket * FP32) if trained and (ranks > 1 or stage >= 1) else 0,
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
            reads_whole=True,
            second_ranks=config.hpz_partition_size if config.hpz_partition_size > 1 else 0,
            gradient_ranks=ranks,
            keeps_gradients=True,
            host_weights=config.offload_params != "none" and not on_cpu,
            gathered=config.gathered,
            in_flight=config.bucket * (COPIES if device == "cpu" else 1),
            cast_bytes=0.0,  # layers remember their weight, not its cast
            fused=config.kernels == "liger",
        )
    return held


def _making(stage: int, ranks: int, on_cpu: bool, host: bool) -> float:
    """Stages 1 and 2 lay the weights out anew, whole on a CPU, by way of the host where a GPU has no room for both, and
    copy the rank's part for the optimizer. Stage 3 lays its part out anew. The optimizer of the host has copies of its
    own: its weights, and with stage 3 gradients."""
    part = FP32 / ranks
    if stage in (1, 2):
        return FP32 + (part if host else 0) if on_cpu else part
    if stage == 3:
        return part * (3 if host and on_cpu else 1)
    return 0.0
