"""What an engine needs in order to compute with its base and adapters beside it."""

from __future__ import annotations

import importlib.util
import re
from functools import cache
from pathlib import Path
from typing import Any

from rlhf.interfaces import GeneratorSpec, LowRankAdapters

from rlhf_plugin_vllm.config import VllmGeneratorConfig

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""For which vLLM reserves memory."""
ADAPTER = 1
"""vLLM's number of the adapter that every request names."""


def refusal(config: VllmGeneratorConfig, spec: GeneratorSpec, model: Any, device: str | None) -> str:
    """See :meth:`rlhf.interfaces.Generator.refuses_adapters`.

    Args:
        model: the transformers config of the text model.
        device: ``cpu`` | ``cuda``; None: not known.
    """
    assert spec.adapters is not None
    if config.pipeline_parallel > 1:
        return f"generator.pipeline_parallel = {config.pipeline_parallel}: a stage has a part of the layers only"
    if spec.max_images:
        return "the rows have images, with which no test proves it"
    architecture = next(iter(getattr(model, "architectures", None) or ()), "")
    if serves_adapters(architecture) is False:
        return f"vLLM's class for {architecture} takes none"
    if spec.adapters.rank > RANKS[-1]:
        return f"trainer.lora.rank = {spec.adapters.rank}: vLLM's kernels take up to {RANKS[-1]}"
    if device == "cuda" and (config.dtype if config.dtype != "auto" else spec.dtype) == "fp32":
        return "generator.dtype = 'fp32': vLLM's kernels for adapters on a GPU compute in bf16"
    return ""


@cache
def serves_adapters(architecture: str) -> bool | None:
    """Whether vLLM's class for an architecture takes adapters, read from the source of the installed vLLM, whose import
    takes seconds. None: not known; then the engine says so when it starts."""
    package = importlib.util.find_spec("vllm")
    for place in (package.submodule_search_locations if package is not None else None) or ():
        models = Path(place) / "model_executor" / "models"
        registry = models / "registry.py"
        text = registry.read_text(encoding="utf-8") if registry.is_file() else ""
        entry = re.search(rf'"{re.escape(architecture)}":\s*\(\s*"(\w+)",\s*"(\w+)"', text)
        file = models / f"{entry[1]}.py" if entry else None
        if entry and file is not None and file.is_file():
            return _declares(entry[2], file.read_text(encoding="utf-8"))
    return None


def _declares(name: str, source: str) -> bool | None:
    """Whether a class of the source, or one that it derives from, names vLLM's interface for adapters."""
    header = re.search(rf"^class {name}\(([^)]*)\)", source, re.MULTILINE)
    bases = re.findall(r"[\w.]+", header[1]) if header else []
    if "SupportsLoRA" in bases:
        return True
    others = [base for base in bases if base != "nn.Module" and not base.startswith("Supports")]
    answers = {_declares(base, source) for base in others}
    return True if True in answers else None if not bases or None in answers else False


def adapter_arguments(adapters: LowRankAdapters) -> dict[str, Any]:
    """Arguments for vLLM's ``EngineArgs``. Other layers get no memory for adapters: that of a head would be large."""
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
