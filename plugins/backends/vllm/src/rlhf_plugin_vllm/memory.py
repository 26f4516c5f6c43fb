"""Memory of an engine, for ``rlhf plan``. vLLM is not imported and need not be installed."""

from __future__ import annotations

from rlhf.interfaces.memory import FP32, EngineMemory, ModelSize, PhaseMemory, SamplingWork
from rlhf_modeling.activations import Arithmetic
from rlhf_modeling.arithmetic import computes_bf16
from rlhf_modeling.images.memory import prompts_working
from rlhf_modeling.memory import product

from rlhf_plugin_vllm.config import VllmGeneratorConfig
from rlhf_plugin_vllm.engine.quantization import bytes_saved

PREFILL_TOKENS = 8192
"""Default number of tokens of one forward pass (``max_batched_tokens``)."""
MEMORY_SHARE = 0.9
"""Default share of a GPU (``memory_share``). If roles share the GPU, it is a share of the memory that is free when the
engine starts."""
CPU_WORKING = 150 * 2**20
"""Bytes on a CPU beyond weights and cache (measured with 100 M parameters)."""
KV_CACHE_GIB = 1.0
"""Default of ``kv_cache_gib`` on a CPU."""


def engine_memory(
    config: VllmGeneratorConfig,
    dtype: str,
    size: ModelSize,
    work: SamplingWork,
    device: str,
    device_bytes: int | None,
) -> EngineMemory:
    """See :meth:`rlhf.interfaces.Generator.memory`. On a GPU an engine claims a share of the device, or of the memory
    that is free at its start if roles are on the device. Weights come first, and the cache gets the rest. On a CPU the
    cache has a fixed size. A tied head exists twice there, because one copy is packed for its kernel."""
    element = 2.0 if computes_bf16(config.dtype if config.dtype != "auto" else dtype, device) else 4.0
    tensor, pipeline = config.tensor_parallel, config.pipeline_parallel
    parts, token = tensor * pipeline, size.cache_bytes(element, tensor, pipeline)
    count = size.parameters + (size.head if device == "cpu" and size.tied else 0)
    saved = bytes_saved(size, element) if config.quantization is not None else 0
    weights = int((count * element - saved) / parts)
    working = CPU_WORKING if device == "cpu" else 0
    space = config.kv_cache_gib if device == "cuda" or config.kv_cache_gib is not None else KV_CACHE_GIB
    if space is not None:
        cache, cache_text = int(space * 2**30), "reserved at the start"
    elif device_bytes is not None:
        share, base, base_name = config.memory_share or MEMORY_SHARE, device_bytes, "the device"
        if config.memory_share is None and work.occupied is not None:
            base, base_name = max(0, device_bytes - work.occupied), "what is free at its start"
        cache = max(0, int(share * base) - weights - working)
        cache_text = f"what {share:g} of {base_name} leaves, {token / 1024:.4g} KiB per token"
    else:
        cache, cache_text = int(work.longest * token), "one sequence, because the device's memory is not known"
    sizes = {"weights": weights, "working": working, "cache": cache}
    awake = PhaseMemory({part: number for part, number in sizes.items() if number})
    generate = awake
    if space is not None:  # otherwise the share of the device includes it
        bf16, rows = element == 2.0, min(config.max_sequences, work.samples) * config.step_tokens
        prompts = min(config.max_batched_tokens or PREFILL_TOKENS, work.samples * work.longest_prompt)
        added = prompts_working(size, work, Arithmetic(prompts, work.longest, device=device, bf16=bf16))
        added = max(added, 4 * rows * size.vocabulary * FP32)
        generate = PhaseMemory({**awake.device, "working": working + added})
    # asleep it keeps only the memory of its process; at level 1 the host holds the weights
    asleep = awake if device != "cuda" else PhaseMemory({}, weights if config.sleep_level == 1 else 0)
    explained = product(count, element, parts, over="devices")
    if saved:
        explained += f", less {saved / parts / 1e6:.4g} MB that quantised layers save"
    return EngineMemory(
        {"rest": awake, "asleep": asleep, "generate": generate},
        sleeps=device == "cuda",
        cache_token=token,
        cache=cache,
        arithmetic={"weights": explained, "cache": cache_text},
    )
