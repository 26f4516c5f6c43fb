"""Settings of an engine that computes with its base and with adapters beside it."""

from __future__ import annotations

from typing import Any

from rlhf.interfaces import GeneratorSpec, LowRankAdapters

from rlhf_plugin_vllm.config import VllmGeneratorConfig

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks for which vLLM reserves memory."""
ADAPTER = 1
"""vLLM's number of the adapter in requests."""


def refusal(config: VllmGeneratorConfig, spec: GeneratorSpec, device: str | None) -> str:
    """See :meth:`rlhf.interfaces.Generator.refuses_adapters`. When the engine starts, vLLM checks whether its class for
    the model supports adapters.

    Args:
        device: ``cpu`` | ``cuda``; None: unknown.
    """
    assert spec.adapters is not None
    if config.pipeline_parallel > 1:
        return f"generator.pipeline_parallel = {config.pipeline_parallel}: a stage has only a part of the layers"
    if config.quantization is not None:
        return f"generator.quantization = {config.quantization!r}: not tested with a quantised base"
    if spec.max_images:
        return "the rows have images, with which it is not tested"
    if spec.adapters.rank > RANKS[-1]:
        return f"trainer.lora.rank = {spec.adapters.rank}: vLLM's kernels support up to {RANKS[-1]}"
    if device == "cuda" and (config.dtype if config.dtype != "auto" else spec.dtype) == "fp32":
        return "generator.dtype = 'fp32': vLLM's kernels for adapters on a GPU compute in bf16"
    return ""


def adapter_arguments(adapters: LowRankAdapters) -> dict[str, Any]:
    """Arguments for vLLM's ``EngineArgs``. Layers without adapters get no memory for them, which would be large for a
    head."""
    return {
        "enable_lora": True,
        "max_loras": 1,
        "max_lora_rank": next(rank for rank in RANKS if rank >= adapters.rank),
        "lora_target_modules": list(adapters.layers),
    }


def adapter_request() -> Any:
    """vLLM's request for the adapter. Its path is never read: workers get the tensors by a load of weights."""
    from vllm.lora.request import LoRARequest

    return LoRARequest("policy", ADAPTER, "none: the tensors are loaded from memory")
