"""What an engine would hold, for ``rlhf plan``: no vLLM is imported and none need be installed."""

from __future__ import annotations

import torch
from rlhf.interfaces.memory import Footprint
from rlhf_modeling.precision import choose_precision

from rlhf_plugin_vllm.config import VllmGeneratorConfig

PREFILL_TOKENS = 8192
"""Tokens of one forward pass where ``max_batched_tokens`` is absent."""
MEMORY_SHARE = 0.9
CPU_WORKING = 150 * 2**20
"""On a CPU, of an engine that has started: beyond weights and cache (measured with 100 M parameters, docs/plan.md)."""
KV_CACHE_GIB = 1.0
"""On a CPU, where ``kv_cache_gib`` is absent."""


def footprint(config: VllmGeneratorConfig, dtype: str, device: str) -> Footprint:
    """See :meth:`rlhf.interfaces.Generator.footprint`."""
    wanted = config.dtype if config.dtype != "auto" else dtype
    if wanted == "auto":  # a GPU that serves models has bf16; a processor is asked
        wanted = "bf16" if device == "cuda" else choose_precision("auto", torch.device("cpu")).name
    each = 2.0 if wanted == "bf16" else 4.0
    space = config.kv_cache_gib if device == "cuda" or config.kv_cache_gib is not None else KV_CACHE_GIB
    exact = None if space is None else int(space * 2**30)
    return Footprint(
        weight_bytes=each,
        tensor_parallel=config.tensor_parallel,
        pipeline_parallel=config.pipeline_parallel,
        kv_bytes=each,
        share=(config.memory_share or MEMORY_SHARE) if exact is None else None,
        kv_space=exact,
        rows=config.max_sequences,
        prefill_tokens=config.max_batched_tokens or PREFILL_TOKENS,
        working=CPU_WORKING if device == "cpu" else 0,
        own_head=device == "cpu",
        repeats_prompts=True,
        sleeps=device == "cuda",
    )
