"""Counts the floating-point operations of a role's model (:class:`rlhf.interfaces.model.Flops`), from its config and
the shapes of its weights."""

from __future__ import annotations

from typing import Any

from rlhf.interfaces import ModelSpec
from rlhf.interfaces.model import Flops
from torch import nn

from rlhf_modeling.images.architecture import has_vision
from rlhf_modeling.skeleton import skeleton

FULL_ATTENTION = frozenset({"full_attention", "attention"})
WITHOUT_PAIRS = frozenset({"linear_attention", "conv", "mamba", "recurrent"})
"""Layers that read a state instead of earlier tokens. Only their weights are counted."""
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k")


def count_flops(spec: ModelSpec, outputs: int, adapters: bool) -> Flops | None:
    """Count the operations. None if the count would be wrong: with images, for a model that transformers cannot build
    from its config alone, and for unknown layers.

    Args:
        outputs: number of outputs of the head.
        adapters: the weights of the layers are frozen. Adapters are not counted.
    """
    if spec.images:
        return None
    try:
        module = skeleton(spec.path, spec.trust_remote_code)
        return None if has_vision(module) else _count(module, outputs, adapters)
    except Exception:  # of many kinds: configs come from other people
        return None


def _count(module: Any, outputs: int, adapters: bool) -> Flops | None:
    config, head = module.config.get_text_config(), module.get_output_embeddings()
    pairs = _pairs(config)
    share = _share_of_experts(config)
    if pairs is None or getattr(config, "is_heterogeneous", False):
        return None
    uncounted_ids = {id(head.weight)} | {id(m.weight) for m in module.modules() if isinstance(m, nn.Embedding)}
    weights = 0.0
    for name, p in module.named_parameters():
        if p.ndim < 2 or id(p) in uncounted_ids:
            continue
        # Shared experts process every token.
        chosen = ".experts." in f".{name}." and "shared" not in name
        if chosen and share is None:
            return None
        weights += p.numel() * (share or 1.0 if chosen else 1.0)
    return Flops(2.0 * weights, 2.0 * outputs * head.weight.shape[1], pairs, 0.0 if adapters else 1.0)


def _share_of_experts(config: Any) -> float | None:
    """The share of the experts that process a token. None if the model has no experts, or if the share is unknown."""
    number, chosen = _first(config, EXPERTS), _first(config, CHOSEN)
    return chosen / number if number and chosen else None


def _pairs(config: Any) -> tuple[tuple[int | None, float], ...] | None:
    heads = int(config.num_attention_heads)
    size = _first(config, ("head_dim",)) or config.hidden_size // heads
    keys, values = size, size
    if _first(config, ("kv_lora_rank",)):
        keys = config.qk_nope_head_dim + config.qk_rope_head_dim
        values = config.v_head_dim
    window = _first(config, ("sliding_window",)) if getattr(config, "use_sliding_window", True) else None
    kinds = getattr(config, "layer_types", None) or ["plain"] * config.num_hidden_layers
    totals: dict[int | None, float] = {}
    for kind in kinds:
        if kind in WITHOUT_PAIRS:
            continue
        if kind not in FULL_ATTENTION | {"plain", "sliding_attention"} or (kind == "sliding_attention" and not window):
            return None
        span = None if kind in FULL_ATTENTION else window
        totals[span] = totals.get(span, 0.0) + 2.0 * heads * (keys + values)
    return tuple(totals.items())


def _first(config: Any, names: tuple[str, ...]) -> int | None:
    return next((int(n) for name in names if isinstance(n := getattr(config, name, None), int) and n), None)
