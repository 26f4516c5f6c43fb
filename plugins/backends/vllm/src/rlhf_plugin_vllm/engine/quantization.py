"""Settings of an engine that quantises its weights, and the checks that refuse it."""

from __future__ import annotations

import torch
from rlhf.errors import CapabilityError
from rlhf.interfaces import GeneratorSpec
from rlhf.interfaces.memory import ModelSize
from rlhf_modeling.precision import choose_precision

from rlhf_plugin_vllm.config import VllmGeneratorConfig
from rlhf_plugin_vllm.platforms import Platform
from rlhf_plugin_vllm.versions import require

SCALE = 4
"""Bytes of a row's scale."""


def check_quantization(
    config: VllmGeneratorConfig, spec: GeneratorSpec, platform: Platform | None, experts: int
) -> None:
    """Raises CapabilityError if vLLM would not quantise, or if no test proves the samples or the sync.

    Args:
        experts: number of experts per layer of the model.
    """
    if config.quantization is None:
        return
    dtype = config.dtype if config.dtype != "auto" else spec.dtype
    if platform is not None:
        dtype = choose_precision(dtype, torch.device(platform.device)).name
    refused = {
        "generator.dtype = 'fp32', because vLLM then multiplies in bf16. Set generator.dtype = 'bf16'": dtype == "fp32",
        "generator.pipeline_parallel > 1": config.pipeline_parallel > 1,
        "generator.sleep_level = 2": config.sleep_level == 2,
        "generator.speculative": config.speculative is not None,
        "images in the rows": spec.max_images > 0,
        "mixtures of experts": experts > 0,
    }
    for reason, applies in refused.items():
        if applies:
            advice = "" if dtype == "fp32" else ", because this is not tested. Remove one of the two"
            raise CapabilityError(
                f"the generator 'vllm' with generator.quantization = {config.quantization!r} does not support "
                f"{reason}{advice}."
            )
    if platform is not None:
        require(platform.distribution, "generator.quantization", "loads weights with it in a way that is not tested")


def bytes_saved(size: ModelSize, element: float) -> float:
    """Bytes that quantised linear layers save, with ``element`` bytes per unquantised weight. Layers with the same name
    count as equal."""
    return sum(i * o // count * (element - 1) - SCALE * o for _, i, o, count in size.linear)
