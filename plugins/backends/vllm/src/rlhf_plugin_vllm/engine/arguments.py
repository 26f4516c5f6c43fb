"""The arguments of a vLLM engine, from the generator's options and the run's lengths."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rlhf.errors import CapabilityError
from rlhf.interfaces import GeneratorSpec
from rlhf_hub.published import model_folder

from rlhf_plugin_vllm.config import VllmGeneratorConfig
from rlhf_plugin_vllm.engine.adapters import adapter_arguments
from rlhf_plugin_vllm.engine.device_memory import memory_fraction
from rlhf_plugin_vllm.engine.speculative import speculative_arguments
from rlhf_plugin_vllm.memory import KV_CACHE_GIB, PREFILL_TOKENS
from rlhf_plugin_vllm.platforms import Platform

WORKER = "rlhf_plugin_vllm.worker.extension.WeightReceiver"


def arguments(config: VllmGeneratorConfig, spec: GeneratorSpec, platform: Platform, dtype: str) -> dict[str, Any]:
    """Arguments for vLLM's ``EngineArgs``, for an engine that starts now. vLLM gets no tokenizer, because the run
    encodes and decodes text. Only processors of images need one.

    Raises CapabilityError if the model, or a part of a sequence, does not fit.
    """
    length, tokens = prefill_tokens(config, spec, platform)
    chosen: dict[str, Any] = {
        "model": model_folder(spec.path, weights=True, code=spec.trust_remote_code),
        "skip_tokenizer_init": spec.max_images == 0,
        "limit_mm_per_prompt": {"image": spec.max_images, "video": 0, "audio": 0},
        "mm_processor_cache_gb": 0,  # ImagePrompts keeps the pixels of images
        "skip_mm_profiling": platform.cpu,  # the size of the cache is fixed, so nothing is measured
        "trust_remote_code": spec.trust_remote_code,
        "dtype": {"fp32": "float32", "bf16": "bfloat16"}[dtype],
        "quantization": config.quantization,
        # vLLM also seeds numpy, whose seeds have 32 bits.
        "seed": spec.seed % 2**32,
        "max_model_len": length,
        "max_num_seqs": config.max_sequences,
        "max_num_batched_tokens": tokens,
        "tensor_parallel_size": config.tensor_parallel,
        "pipeline_parallel_size": config.pipeline_parallel,
        "enforce_eager": platform.cpu if config.eager is None else config.eager,
        "enable_prefix_caching": config.prefix_caching,
        # After temperature and truncation, because training needs the distribution that was sampled from.
        "logprobs_mode": "processed_logprobs",
        # The defaults in the model's generation_config.json must not change requests.
        "generation_config": "vllm",
        "worker_extension_cls": WORKER,
        # With it, vLLM computes the next tokens before the last ones are known here. A sync between two steps would
        # attribute them to the new weights (``Turn.versions``).
        "async_scheduling": False,
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
    }
    if spec.experts is not None:
        chosen["enable_return_routed_experts"] = True
    space = config.kv_cache_gib if config.kv_cache_gib is not None or not platform.cpu else KV_CACHE_GIB
    if space is not None:
        chosen["kv_cache_memory_bytes"] = int(space * 2**30)
    if platform.cpu:
        # For a seeded prompt in two chunks vLLM reads the offset of the generator. A CPU generator has none, so the
        # engine would die.
        chosen["enable_chunked_prefill"] = False
    else:
        if config.chunked_prefill is not None:
            chosen["enable_chunked_prefill"] = config.chunked_prefill
        chosen["gpu_memory_utilization"] = memory_fraction(config, spec, Path(chosen["model"]), dtype)
        chosen["enable_sleep_mode"] = spec.shares_devices  # its allocator costs time and memory
    if config.tensor_parallel * config.pipeline_parallel > 1:
        chosen["distributed_executor_backend"] = "mp"
    if spec.adapters is not None:
        chosen |= adapter_arguments(spec.adapters)
    if config.speculative is not None:
        chosen |= speculative_arguments(config.speculative, config.max_sequences)
    return chosen


def prefill_tokens(config: VllmGeneratorConfig, spec: GeneratorSpec, platform: Platform) -> tuple[int, int]:
    """(longest sequence, tokens of one forward pass). Raises CapabilityError if a prompt would have to be split but
    cannot be: on a CPU, and without ``chunked_prefill``."""
    length = _length(spec)
    tokens = config.max_batched_tokens or max(PREFILL_TOKENS, length, config.max_sequences * config.step_tokens)
    if (platform.cpu or config.chunked_prefill is False) and tokens < length:
        reason = "on a CPU prompts are not split" if platform.cpu else "chunked_prefill = false does not split prompts"
        raise CapabilityError(
            f"max_batched_tokens = {tokens} does not hold a sequence of {length} tokens (data.max_tokens + 1), and "
            f"{reason}. Raise it, or remove it."
        )
    return length, tokens


def _length(spec: GeneratorSpec) -> int:
    """The run's longest sequence plus one token, so that a sequence of full length can be scored. At most the model's
    positions, unless the model scales its positions."""
    config = text_config(spec)
    positions = getattr(config, "max_position_embeddings", None)
    stretched = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default") != "default"
    length = spec.max_tokens + 1
    return length if positions is None or stretched else min(length, positions)


def text_config(spec: GeneratorSpec) -> Any:
    """The transformers config of the model's text part."""
    from transformers import AutoConfig

    place = model_folder(spec.path, code=spec.trust_remote_code)
    return AutoConfig.from_pretrained(place, trust_remote_code=spec.trust_remote_code).get_text_config()
