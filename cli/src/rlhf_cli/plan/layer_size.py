"""Reads the widths of one decoder layer from its module and config."""

from __future__ import annotations

from typing import Any

from rlhf.interfaces.memory import LayerSize

KEYS = ("k_proj", "key_proj", "key", "k")
"""Names of the matrix of keys."""
TOGETHER = ("query_key_value", "qkv_proj", "c_attn", "Wqkv", "qkv", "W_pack")
"""Names of one matrix that makes queries, keys and values."""


def layer_size(layer: Any, config: Any) -> LayerSize:
    """``layer``: the module. ``config``: of the text model."""
    hidden = int(config.hidden_size)
    matrices = {n: p for n, p in layer.named_parameters() if p.ndim >= 2}
    heads = first(config, "num_attention_heads") or 1
    key_heads = first(config, "num_key_value_heads") or heads
    size = first(config, "head_dim") or hidden // heads
    query = heads * size
    key = value = _key_width(matrices, hidden, query) or key_heads * size
    if first(config, "kv_lora_rank"):  # latent attention computes with whole heads, and caches less
        size = (first(config, "qk_nope_head_dim") or 0) + (first(config, "qk_rope_head_dim") or 0)
        query, key, value = heads * size, heads * size, heads * (first(config, "v_head_dim") or size)
    feed = sum(p.numel() for n, p in matrices.items() if "attn" not in n and "attention" not in n)
    experts = first(config, "num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    ffn = first(config, "intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size") or 4 * hidden
    active = 0
    if experts and any("expert" in n for n in matrices):
        active = first(config, "num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k") or 1
        width = first(config, "moe_intermediate_size") or ffn
        shared = sum(p.shape[-1] for n, p in matrices.items() if "shared" in n and "down_proj" in n)
        gated = feed > 2.5 * experts * hidden * width
        ffn = active * width + int(shared)
    else:
        gated = feed > 2.5 * hidden * ffn
    normed = any("q_norm" in n for n, _ in layer.named_parameters())
    norms = sum("norm" in n and n.endswith("weight") and p.numel() == hidden for n, p in layer.named_parameters())
    total = sum(p.numel() for p in layer.parameters())
    largest = max(p.numel() for p in layer.parameters())
    return LayerSize(total, query, key, value, heads, ffn, gated, active, normed, max(1, norms), largest)


def _key_width(matrices: dict[str, Any], hidden: int, query: int) -> int | None:
    """Width of the keys, from the matrix that makes them, or from one that makes queries and values too; None: the
    layer has no such matrix."""
    for name, matrix in matrices.items():
        last = name.removesuffix(".weight").rpartition(".")[2]
        outputs = matrix.numel() // hidden
        if matrix.ndim == 2 and last in KEYS:
            return int(outputs)
        if matrix.ndim == 2 and last in TOGETHER and outputs > query:
            return int(outputs - query) // 2
    return None


def cached(layer: LayerSize, kind: str, config: Any) -> int:
    """Elements of the key-value cache per token. Linear and recurrent layers have none."""
    if "attention" not in kind or "linear" in kind:
        return 0
    latent = first(config, "kv_lora_rank")
    if latent:
        return latent + (first(config, "qk_rope_head_dim") or 0)
    return layer.key + layer.value


def first(config: Any, *names: str) -> int | None:
    """The first of these fields that is a number."""
    for name in names:
        value = getattr(config, name, None)
        if isinstance(value, int | float) and value:
            return int(value)
    return None
