"""Models that vLLM's CPU kernels compute wrongly or not at all."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Collection
from functools import cache
from pathlib import Path
from typing import Any

from rlhf.errors import CapabilityError

_BACKEND = ("v1", "attention", "backends", "cpu_attn.py")
_SIZES = "get_supported_head_sizes"
_EXPERTS = ("num_experts", "moe_num_experts", "n_routed_experts", "num_local_experts")
"""Config fields in which vLLM searches for the number of experts."""


def check_cpu_model(model: str, head_size: int | None, sizes: Collection[int] | None, experts: int) -> None:
    """Raises CapabilityError if a model cannot be sampled from on a CPU.

    Args:
        head_size: size of the attention heads; None: unknown, or a latent cache, which other kernels compute.
        sizes: the head sizes that vLLM's CPU attention supports; None: unknown.
    """
    if head_size is not None and sizes is not None and head_size not in sizes:
        raise CapabilityError(
            f"{model!r} has attention heads of size {head_size}; vLLM's attention on a CPU supports "
            f"{', '.join(map(str, sizes))}. Use a GPU, another model, or --generator.use transformers."
        )
    if experts > 0:
        raise CapabilityError(
            f"{model!r} is a mixture of experts: on a CPU vLLM keeps using the experts' old weights after a sync. Use "
            "a GPU, or --generator.use transformers."
        )


def check_cpu_config(model: str, config: Any) -> None:
    """:func:`check_cpu_model` from the transformers config alone. It does not import vLLM, because that takes seconds
    and changes the process.

    Args:
        config: config of the text model.
    """
    if getattr(config, "is_heterogeneous", False):  # a field that differs between layers is refused by the whole
        for layer in config.per_layer_config:
            check_cpu_config(model, layer)
        return
    size = getattr(config, "head_dim", None)
    heads, hidden = getattr(config, "num_attention_heads", None), getattr(config, "hidden_size", None)
    if size is None and isinstance(heads, int) and isinstance(hidden, int):
        size = hidden // heads
    if getattr(config, "kv_lora_rank", None):
        size = None
    check_cpu_model(model, size, supported_head_sizes(), expert_count(config))


def expert_count(config: Any) -> int:
    """Number of experts per layer, from the transformers config of the text model; 0 if there are none."""
    counts = [getattr(config, name, None) for name in _EXPERTS]
    return max(c if isinstance(c, int) else 0 for c in counts)


@cache
def supported_head_sizes() -> tuple[int, ...] | None:
    """The result of ``CPUAttentionBackend.get_supported_head_sizes`` of the installed vLLM, read from its source. None
    if the source does not return a list of numbers. The engine then checks the size when it starts."""
    spec = importlib.util.find_spec("vllm")
    places = spec.submodule_search_locations if spec is not None else None
    for place in places or ():
        file = Path(place).joinpath(*_BACKEND)
        if file.is_file():
            return _returned(ast.parse(file.read_text(encoding="utf-8")))
    return None


def _returned(tree: ast.AST) -> tuple[int, ...] | None:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name == _SIZES and isinstance(node.body[-1], ast.Return):
            try:
                sizes = ast.literal_eval(node.body[-1].value or ast.Constant(None))
            except ValueError:
                return None
            return tuple(sizes) if isinstance(sizes, list) and all(isinstance(s, int) for s in sizes) else None
    return None
