"""A published config made small in proportion.

Counts of heads are divided by one factor, sizes of heads by a second one, and all other widths by their product. So
ratios stay: query to key-value heads, heads to the hidden size, an embedding size that is not the hidden size. One
layer of every kind stays, and at least 16 experts where there are more. Windows and chunks become shorter than the
sequences of a probe, the vocabulary is cut, dropout is 0. Vision and audio parts get the sizes of
:mod:`tests.support.tiny_sizes`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from tests.support.tiny_architectures import BY_NAME, LAYERS, PARTS, TOKENS, merge, shrink
from tests.support.tiny_sizes import NOT_BUILT, PUBLISHED, VOCABULARY, WINDOW

KINDS = {
    "query heads": """num_attention_heads n_head n_heads attention_heads decoder_attention_heads num_heads
        num_decoder_attention_heads""",
    "heads": """encoder_attention_heads num_encoder_attention_heads linear_num_value_heads linear_num_heads
        linear_num_key_heads mamba_num_heads mamba_n_heads n_mamba_heads swa_num_attention_heads index_n_heads
        num_key_value_heads num_kv_heads kv_n_heads num_query_groups num_global_key_value_heads swa_num_key_value_heads
        n_groups mamba_n_groups mamba_ngroups o_groups indexer_n_heads indexer_kv_heads
        num_attention_heads_per_layer""",
    "head size": """head_dim attention_head_size d_head linear_head_dim linear_key_head_dim linear_value_head_dim
        rotary_dim qk_rope_head_dim qk_nope_head_dim v_head_dim index_head_dim swa_head_dim swa_v_head_dim mamba_d_head
        mamba_head_dim mamba_headdim attention_head_dim kv_channels global_head_dim indexer_head_dim dim_head
        qk_head_dim""",
    "scale": "query_pre_attn_scalar",
    "sections": "mrope_section",
    "state": "ssm_state_size state_size mamba_d_state",
    "hidden": "hidden_size d_model n_embd emb_dim dim_model",
    "width": "hidden_size_global block_width",
    "experts": "num_experts n_routed_experts num_local_experts moe_num_experts",
    "chosen experts": "num_experts_per_tok num_experts_per_token moe_topk moe_k top_k_experts moe_top_k",
    "groups of experts": "n_group num_expert_group",
    "period": "attn_layer_period expert_layer_period moe_layer_freq decoder_sparse_step",
    "first layers": "first_k_dense_replace num_dense_layers max_window_layers",
    "layer numbers": """attn_layer_indices cross_attention_layers full_attn_idxs moe_layers hybrid_layer_ids
        mlp_only_layers""",
}
"""Fields by what they count; ``state``: a size that no other size depends on."""
FIXED = {name: size for name, size in BY_NAME.items() if size in (WINDOW, VOCABULARY)} | {
    "chunk_size": 16, "mamba_chunk_size": 16, "max_source_positions": 64, "num_mel_bins": 16, "num_codebooks": 2,
    "block_multiple_of": 16, "heavily_compressed_attention": WINDOW, "log_scaling_n_floor": WINDOW,
    "floor_scale": 3 * WINDOW, "index_block_size": 8, "index_n_heads": 8, "indexer_budget": 16,
    "unpadded_vocab_size": VOCABULARY - 4,
}  # fmt: skip
"""Sizes that are not in proportion to others. With few heads, an index scores many tokens 0, and which of them it
chooses depends on the number of tokens."""
_BY_SIZE = {64: "feed-forward", 32: "width", 16: "width"}
KIND = (
    {name: _BY_SIZE[size] for name, size in BY_NAME.items() if size in _BY_SIZE}
    | {name: kind for kind, names in KINDS.items() for name in names.split()}
    | dict.fromkeys(FIXED, "fixed")
)
OF_THE_CHECKPOINT = {
    "architectures", "auto_map", "dtype", "quantization_config", "torch_dtype", "transformers_version",
}  # fmt: skip
"""Fields that say how weights are stored and which classes wrote them."""
EXPERTS = 16
WIDEST, HEAD_SIZE = 256, 32
"""Hidden size and size of heads that are aimed at. vLLM computes no smaller heads on a CPU."""


def published_fields(kind: str) -> dict[str, Any]:
    """The config of a type as it is published, where it is not the default of its class.

    Raises NotImplementedError with the reason, where no small language model of the type can be made.
    """
    if kind in NOT_BUILT:
        raise NotImplementedError(NOT_BUILT[kind])
    return {"model_type": kind, **PUBLISHED.get(kind, {})}


def small_config(published: Mapping[str, Any]) -> Any:
    """A small config in proportion to one of the hub's form, of the class that its ``model_type`` names.

    Raises what the class does with fields that do not fit each other.
    """
    from transformers import AutoConfig

    settings = {key: value for key, value in published.items() if key not in OF_THE_CHECKPOINT}
    kind = settings.pop("model_type")
    fields = merge(_without_layers(settings), proportional(AutoConfig.for_model(kind, **settings)))
    return AutoConfig.for_model(kind, **fields)


def _without_layers(fields: Mapping[str, Any]) -> dict[str, Any]:
    """``fields`` without the table of single layers, which names layers that are left out."""
    return {
        key: _without_layers(value) if isinstance(value, dict) else value
        for key, value in fields.items()
        if key != "per_layer_config"
    }


def proportional(config: Any) -> dict[str, Any]:
    """The fields of ``config`` that are to be smaller, for its class."""
    fields = config.to_dict()
    texts = list(_texts(fields))
    heads = _factor_of_heads(texts)
    return _small(config, fields, heads, _factor_of_head_sizes(texts, heads))


# ----------------------------------------------------------------------------------------------- factors


def _texts(fields: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """A config and its parts that compute text."""
    yield fields
    for key, value in fields.items():
        if isinstance(value, dict) and (key.endswith("_config") or key in PARTS) and not _is_sense(key):
            yield from _texts(value)


def _is_sense(key: str) -> bool:
    return any(part in key for part in ("vision", "audio", "vq_config"))


def _tables(fields: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """A config and the tables in it that describe its layers."""
    yield fields
    for key in ("rope_parameters", "per_layer_config"):
        value = fields.get(key)
        if isinstance(value, dict):
            yield value
            yield from (inner for inner in value.values() if isinstance(inner, dict))


def _numbers(tables: Collection[Mapping[str, Any]], *kinds: str) -> list[int]:
    """All numbers above one in fields of these kinds."""
    values = [v for table in tables for name, v in table.items() if KIND.get(name) in kinds]
    flat = [v for value in values for v in (value if isinstance(value, list | tuple) else [value])]
    return [v for v in flat if isinstance(v, int) and not isinstance(v, bool) and v > 1]


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def _factor_of_heads(texts: Collection[Mapping[str, Any]]) -> int:
    """The largest common divisor that leaves two of everything that is more than one, and four query heads."""
    counts, query = _numbers(texts, "query heads", "heads"), _numbers(texts, "query heads")
    fitting = [d for d in _divisors(math.gcd(*counts)) if min(counts) // d >= 2 and all(q // d >= 4 for q in query)]
    return max(fitting, default=1)


def _factor_of_head_sizes(texts: Collection[Mapping[str, Any]], heads: int) -> int:
    """The smallest common divisor that makes the model narrow enough. Sizes that are rotated stay even."""
    sizes: list[int] = []
    rotated: list[int] = []
    hidden = max(_numbers(texts, "hidden"), default=0)
    for text in texts:
        tables = list(_tables(text))
        head_sizes = _numbers(tables, "head size")
        width, count = max(_numbers([text], "hidden"), default=0), max(_numbers([text], "query heads"), default=0)
        if not text.get("head_dim") and not text.get("qk_rope_head_dim") and count and width % count == 0:
            head_sizes.append(width // count)
        shares = [t.get(name) for t in tables for name in ("partial_rotary_factor", "rotary_pct")]
        main = [t["head_dim"] for t in tables if isinstance(t.get("head_dim"), int)] or head_sizes[-1:]
        rotated += [int(m * share) for m in main for share in shares if isinstance(share, float) and 0 < share < 1]
        rotated += [2 * section for section in _numbers(tables, "sections")]
        sizes += head_sizes
    if not sizes:
        return max(1, hidden // heads // WIDEST)
    rotated = [r for r in rotated if r % 2 == 0]
    even = [d for d in _divisors(math.gcd(*sizes, *rotated)) if all(s // d % 2 == 0 for s in sizes + rotated)]
    fitting = [d for d in even if min(sizes) // d >= 4] or [1]
    return next((d for d in fitting if min(sizes) // d <= HEAD_SIZE and hidden // (heads * d) <= WIDEST), fitting[-1])


def _factor_of_experts(fields: Mapping[str, Any]) -> int:
    """The largest common divisor of all experts and those chosen that leaves two chosen and whole groups."""
    every, chosen = _numbers([fields], "experts"), _numbers([fields], "chosen experts")
    if not every or not chosen:
        return 1
    groups = math.prod(_numbers([fields], "groups of experts"))
    fitting = [d for d in _divisors(math.gcd(*every, *chosen)) if min(chosen) // d >= 2]
    return max((d for d in fitting if min(every) // d % groups == 0), default=1)


def _fewer(every: int, fields: Mapping[str, Any], factor: int) -> int:
    """Half of the experts, as long as there are many."""
    groups = math.prod(_numbers([fields], "groups of experts"))
    minimum = max([EXPERTS, *(2 * n // factor for n in _numbers([fields], "chosen experts"))])
    while every % 2 == 0 and every // 2 >= minimum and every // 2 % groups == 0:
        every //= 2
    return every


# ------------------------------------------------------------------------------------------------ fields


def _small(config: Any, published: Mapping[str, Any], heads: int, size: int) -> dict[str, Any]:
    fields = dict(published)
    query = _numbers([fields], "query heads")
    if "num_key_value_heads" in fields and fields["num_key_value_heads"] is None and query:
        fields["num_key_value_heads"] = query[0]
    out = _layers(fields)
    experts = _factor_of_experts(fields)
    for key, value in fields.items():
        if key in set(getattr(config, "sub_configs", None) or ()) | PARTS:
            if isinstance(sub := getattr(config, key, value), str | None):
                continue
            part = sub if isinstance(sub, dict) else sub.to_dict()
            out[key] = shrink(sub) if _is_sense(key) else _small(sub, part, heads, size)
            if part.get("model_type"):
                out[key]["model_type"] = part["model_type"]
        elif isinstance(value, dict):
            if key in ("rope_parameters", "rope_scaling", "per_layer_config", "compress_rates"):
                out[key] = _table(out.get(key, value), heads, size)
        elif key.endswith("_token_id"):
            out[key] = TOKENS.get(key, 2)
        elif isinstance(value, bool):
            continue
        elif ("drop" in key or "jitter" in key) and isinstance(value, float):
            out[key] = 0.0
        elif KIND.get(key) in ("experts", "chosen experts") and isinstance(value, int) and value > 1:
            out[key] = value // experts if "chosen" in KIND[key] else _fewer(value // experts, fields, experts)
        elif (new := _size(key, out.get(key, value), heads, size)) is not None:
            out[key] = new
    if "is_decoder" in fields:
        out["is_decoder"] = True
    return out


def _table(table: Mapping[str, Any], heads: int, size: int) -> dict[str, Any]:
    """Of the factors of longrope, one for each dimension that stays."""
    out: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, dict):
            out[key] = _table(value, heads, size)
        elif key in ("short_factor", "long_factor"):
            out[key] = value[::size]
        else:
            new = _size(key, value, heads, size)
            out[key] = value if new is None else new
    return out


def _size(key: str, value: Any, heads: int, size: int) -> Any:
    """The new value of a field; None: it stays."""
    if isinstance(value, list | tuple):
        values = [_size(key, v, heads, size) for v in value]
        return values if values and None not in values else None
    if not isinstance(value, int | float) or isinstance(value, bool) or value <= 1:
        return None
    match KIND.get(key):
        case "scale":
            return value // size if isinstance(value, int) else value / size
        case "fixed":
            return FIXED[key]
        case "query heads" | "heads":
            return int(value) // heads
        case "head size" | "sections":
            return int(value) // size
        case "state":
            return max(4, int(value) // size)
        case "feed-forward":
            return max(8, 8 * round(value / (heads * size) / 8))
        case "hidden" | "width":
            exact = value % (heads * size) == 0
            return int(value) // (heads * size) if exact else max(2, 2 * round(value / (heads * size) / 2))
    return None


def _layers(fields: Mapping[str, Any]) -> dict[str, Any]:
    """One layer of every kind, at least two, with the fields that have an entry for each layer or name layers."""
    counts = [key for key in LAYERS if isinstance(fields.get(key), int)]
    if not counts:
        return {}
    count = fields[counts[0]]
    numbered = {k: set(v) for k, v in fields.items() if KIND.get(k) == "layer numbers" and isinstance(v, list | tuple)}
    first = {k: v for k, v in fields.items() if KIND.get(k) == "first layers" and isinstance(v, int)}
    tables = {int(layer): table for layer, table in (fields.get("per_layer_config") or {}).items()}
    shared = fields.get("num_kv_shared_layers") or 0
    lists = {
        key: list(value)
        for key, value in fields.items()
        if isinstance(value, list | tuple) and key not in numbered and len(value) == count > 3
    }
    period = max(_numbers([fields], "period"), default=1)
    if period > 1:
        layers = list(range(min(count, period)))
    else:
        chosen: dict[str, int] = {}
        for layer in range(count):
            kind = [value[layer] for value in lists.values()] + [layer in numbers for numbers in numbered.values()]
            kind += [layer < number for number in first.values()] + [layer >= count - shared, tables.get(layer)]
            chosen.setdefault(repr(kind), layer)
        layers = sorted(chosen.values())[:8]
        layers = sorted([*layers, *[n for n in range(count) if n not in layers][: max(0, 2 - len(layers))]])
    out: dict[str, Any] = {key: [value[layer] for layer in layers] for key, value in lists.items()}
    out |= {key: [new for new, layer in enumerate(layers) if layer in numbers] for key, numbers in numbered.items()}
    out |= {key: sum(layer < number for layer in layers) for key, number in first.items()}
    if tables:
        out["per_layer_config"] = {str(new): tables[layer] for new, layer in enumerate(layers) if layer in tables}
    if shared:
        out["num_kv_shared_layers"] = sum(layer >= count - shared for layer in layers)
    return out | dict.fromkeys(counts, len(layers))
