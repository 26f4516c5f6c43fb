"""Memory of sampling from the trainer's module, for ``rlhf plan``: the key-value cache and temporaries."""

from __future__ import annotations

from typing import Any

from rlhf.interfaces.memory import FP32, EngineMemory, Held, ModelSize, SamplingWork
from rlhf_modeling.activations import Arithmetic
from rlhf_modeling.images.memory import prompts_working


def engine_memory(config: Any, bf16: bool, size: ModelSize, work: SamplingWork, device: str) -> EngineMemory:
    """The largest cache, plus the larger of two: the prompts' forward pass (temporaries of a layer, also of a vision
    tower's, and the prompts' keys and values), or a decoding step (four fp32 matrices of rows x vocabulary, or a second
    copy of one layer's keys).

    Args:
        config: the generator's options.
    """
    rows = min(config.max_batch, work.samples)
    tokens = rows * work.longest
    if config.max_cache_tokens is not None:
        tokens = min(tokens, config.max_cache_tokens)
    token = size.cache_bytes(2.0 if bf16 else 4.0)
    cache = int(tokens * token)
    prompts = min(config.prefill_tokens, work.prompts * work.longest_prompt)
    prompt_pass = prompts_working(size, work, Arithmetic(prompts, work.longest, device=device, bf16=bf16))
    step = max(4 * rows * size.vocabulary * FP32, cache // (2 * len(size.layers)))
    generate = {"cache": cache, "working": max(prompt_pass + int(prompts * token), step)}
    how = {"cache": f"{rows} samples x {work.longest} tokens x {token / 1024:.4g} KiB"}
    phases = {"rest": Held({}), "asleep": Held({}), "generate": Held(generate)}
    return EngineMemory(phases, copy=False, cache_token=token, arithmetic=how)
