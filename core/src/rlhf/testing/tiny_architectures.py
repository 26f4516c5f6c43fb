"""A tiny random model of any architecture of transformers that is a causal language model.

The defaults of a type's config are shrunk by the names of its fields. Lists with an entry for each layer keep one layer
of every kind, so each kind of layer of a hybrid model occurs. What this cannot know stands in :data:`OVERRIDES`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

WINDOW = 8
"""Tokens of a sliding window or an attention chunk."""
POSITIONS = 512
VOCABULARY = 128

SIZES = [
    (32, """hidden_size d_model n_embd emb_dim embedding_size embedding_dim word_embed_proj_dim lru_width embed_dim
        input_embedding_size output_embedding_size backbone_hidden_size cross_attention_hidden_size ple_embed_dim
        pronunciation_embed_dim shape_embed_dim mamba_d_ssm hc_lowrank feed_forward_size kv_lora_rank"""),
    (64, """intermediate_size ffn_dim decoder_ffn_dim encoder_ffn_dim d_inner dff dim_ff n_inner ffn_hidden_size
        dense_intermediate_size intermediate_size_mlp moe_intermediate_size expert_ffn_hidden_size
        shared_intermediate_size shared_expert_intermediate_size moe_shared_expert_intermediate_size
        max_source_positions attention_hidden_size"""),
    (16, """q_lora_rank o_lora_rank laurel_rank adapter_rank gated_norm_rank hidden_size_per_layer_input mamba_dt_rank
        time_step_rank num_mel_bins mamba_d_head mamba_head_dim mamba_headdim attention_head_dim chunk_size
        mamba_chunk_size router_hidden_size kv_channels prompt_mid_dim"""),
    (8, """head_dim attention_head_size d_head linear_head_dim linear_key_head_dim linear_value_head_dim rotary_dim
        qk_rope_head_dim qk_nope_head_dim v_head_dim index_head_dim swa_head_dim ssm_state_size state_size
        mamba_d_state d_rel dim_head index_block_size index_topk"""),
    (4, """num_attention_heads n_head n_heads attention_heads decoder_attention_heads encoder_attention_heads num_heads
        num_decoder_attention_heads num_encoder_attention_heads linear_num_value_heads linear_num_heads
        mamba_num_heads mamba_n_heads n_mamba_heads swa_num_attention_heads num_experts n_routed_experts
        num_local_experts moe_num_experts index_n_heads zero_expert_num"""),
    (2, """num_key_value_heads num_kv_heads num_query_groups linear_num_key_heads swa_num_key_value_heads n_groups
        mamba_n_groups mamba_ngroups num_experts_per_tok num_experts_per_token moe_topk moe_k top_k_experts o_groups
        cross_attn_k num_codebooks index_topk_blocks"""),
    (1, """n_group topk_group num_expert_group n_shared_experts num_shared_experts moe_num_shared_experts
        first_k_dense_replace num_dense_layers"""),
    (WINDOW, """sliding_window window_size attention_window_size attention_chunk_size local_attention
        sliding_window_size keep_window_size"""),
    (POSITIONS, """max_position_embeddings n_positions max_seq_len context_length max_target_positions n_ctx
        model_max_length rel_extent"""),
    (VOCABULARY, """vocab_size vocab_size_per_layer_input decoder_vocab_size audio_vocab_size ngram_vocab_size_base
        shape_vocab_size pronunciation_vocab_size encoder_hash_byte_group_vocab"""),
]  # fmt: skip
"""(size, the fields that get it)."""
BY_NAME = {name: size for size, names in SIZES for name in names.split()}
UNSET = {
    "head_dim", "num_experts_per_tok", "n_routed_experts", "n_shared_experts", "n_group", "topk_group",
    "sliding_window", "num_key_value_heads",
}  # fmt: skip
"""Fields that get their size where their default is None too."""
LAYERS = [
    "num_hidden_layers", "num_layers", "n_layer", "n_layers", "decoder_layers", "encoder_layers",
    "num_decoder_layers", "num_encoder_layers", "num_blocks", "depth",
]  # fmt: skip
TOKENS = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 1, "decoder_start_token_id": 1, "sep_token_id": 1}
"""Ids of special tokens; other fields that end in ``_token_id`` become 2."""

OMIT: Any = object()
"""In :data:`OVERRIDES`: leave the field at its default."""
SHORT_AND_FULL = {"layer_types": ["sliding_attention", "full_attention"]}
COMPASS = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
LLAMA4 = {"interleave_moe_layer_step": 2, "num_experts_per_tok": 1}
QSA = {
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 8,
    "indexer_budget": 8,
    "indexer_compress_ratio": 4,
}
ASSISTANT = {
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 0,
    "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"],
    "num_hidden_layers": 2,
}
MUSIC = {
    "text_encoder": {"model_type": "t5"},
    "audio_encoder": {"model_type": "encodec"},
    "decoder": {"model_type": "musicgen_decoder"},
}
OVERRIDES: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
    "cohere_compass_text": SHORT_AND_FULL | {"rope_parameters": dict.fromkeys(SHORT_AND_FULL["layer_types"], COMPASS)},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4}, "ffn_config": {"moe_top_k": 2}},
    "deepseek_v4": {"compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8}},
    "dots1": SHORT_AND_FULL,
    "falcon_h1": {"mamba_d_head": 8, "lm_head_multiplier": 0.5, "key_multiplier": 0.7, "ssm_multipliers": [0.8] * 5},
    "gemma3n_text": {"intermediate_size": [64] * 4, "num_kv_shared_layers": 2},
    "gemma4_assistant": {"text_config": {"model_type": "gemma4_text", **ASSISTANT}},
    "gemma4_text": {"per_layer_config": {"1": {"head_dim": 16}}},
    "gemma4_unified_assistant": {"text_config": {"model_type": "gemma4_unified_text", **ASSISTANT}},
    "gemma4_unified_text": {"per_layer_config": {"1": {"head_dim": 16}}},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_offset": 0},
    "laguna": SHORT_AND_FULL | {"num_attention_heads_per_layer": [4, 4]},
    "lfm2": {"full_attn_idxs": [1], "num_hidden_layers": 3, "layer_types": OMIT, "block_multiple_of": 16},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv"], "num_hidden_layers": 3},
    "llama4": {"text_config": LLAMA4},
    "llama4_text": LLAMA4,
    "mamba2": {"head_dim": 16},
    "mellum": SHORT_AND_FULL,
    "ministral": SHORT_AND_FULL,
    "mllama": {"text_config": {"cross_attention_layers": [1]}},
    "musicgen": {"first": MUSIC},
    "musicgen_melody": {"first": MUSIC | {"decoder": {"model_type": "musicgen_melody_decoder"}}},
    "qwen4_exp": {"text_config": QSA},
    "qwen4_exp_text": QSA,
    "recurrent_gemma": {"num_hidden_layers": 3},
    "reformer": {
        "axial_pos_embds_dim": [8, 24],
        "axial_pos_shape": [16, 32],
        "local_attn_chunk_length": 8,
        "lsh_attn_chunk_length": 8,
        "hash_seed": 0,
    },
    "xmod": {"default_language": "en_XX"},
    "zamba": {"layers_block_type": ["linear_attention", "hybrid"] * 2, "num_hidden_layers": 4},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"] * 2, "num_hidden_layers": 4},
    "zaya": {"num_experts_per_tok": 1, "layer_types": ["hybrid", "hybrid_sliding"]},
}
"""Fields that the rules above do not know, by type."""

LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [2.0, 3.0, 4.0, 8.0]}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert as an encoder": ("bert", {"is_decoder": False}),
    "falcon with alibi": ("falcon", {"alibi": True}),
    "gemma3_text with both directions": ("gemma3_text", {"use_bidirectional_attention": True}),
    "gemma4_text with shared keys": (
        "gemma4_text",
        {
            "layer_types": SHORT_AND_FULL["layer_types"] * 2,
            "num_hidden_layers": 4,
            "num_kv_shared_layers": 2,
            "per_layer_config": {"1": {"head_dim": 16}, "3": {"head_dim": 16}},
        },
    ),
    "granite with logits_scaling": ("granite", {"logits_scaling": 4.0}),
    "granitemoehybrid with logits_scaling": ("granitemoehybrid", {"logits_scaling": 4.0}),
    "llama with dynamic rope": ("llama", {"rope_parameters": DYNAMIC, "max_position_embeddings": 16}),
    "mixtral with router jitter": ("mixtral", {"router_jitter_noise": 0.1}),
    "phi3 with longrope": (
        "phi3",
        {"rope_parameters": LONGROPE, "original_max_position_embeddings": 16, "max_position_embeddings": 512},
    ),
    "phimoe with input jitter": ("phimoe", {"input_jitter_noise": 0.1}),
    "phimoe with router jitter": ("phimoe", {"router_jitter_noise": 0.1}),
}
"""Options of a config that change what packing must respect: {name: (type, fields)}."""


def causal_types() -> list[str]:
    """Every type of transformers with a causal language model."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def tiny_config(name: str) -> Any:
    """The config of a type, or of one of :data:`VARIANTS`, shrunk."""
    from transformers import AutoConfig

    kind, extra = VARIANTS.get(name, (name, {}))
    fixed = {**OVERRIDES.get(kind, {}), **extra}
    usual = AutoConfig.for_model(kind, **fixed.pop("first", {}))
    fields = merge(shrink(usual), fixed)
    return AutoConfig.for_model(kind, **{k: v for k, v in fields.items() if v is not OMIT})


def merge(fields: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """``fields`` with those of ``over``; nested tables are merged too."""
    out = dict(fields)
    for key, value in over.items():
        held = out.get(key)
        out[key] = merge(held, value) if isinstance(value, dict) and isinstance(held, dict) else value
    return out


def shrink(config: Any) -> dict[str, Any]:
    """The fields of a config that are to be smaller, for its class."""
    fields = config if isinstance(config, dict) else config.to_dict()
    subs = set(getattr(config, "sub_configs", None) or ()) | {"attn_config", "ffn_config"} & set(fields)
    out: dict[str, Any] = {}
    for key, value in fields.items():
        if key in subs:
            sub = getattr(config, key, value)
            if sub is not None and not isinstance(sub, str):
                out[key] = shrink(sub)
                kind = getattr(sub, "model_type", None)
                if kind:
                    out[key]["model_type"] = kind
        elif isinstance(value, bool):
            continue
        elif key in BY_NAME and (isinstance(value, int) or (value is None and key in UNSET)):
            out[key] = BY_NAME[key]
        elif key.endswith("_token_id"):
            out[key] = TOKENS.get(key, 2)
        elif ("drop" in key or "jitter" in key) and isinstance(value, float):
            out[key] = 0.0
    out.update(_layers(fields))
    if "num_key_value_heads" in out and fields["num_key_value_heads"] == fields.get("num_attention_heads"):
        out["num_key_value_heads"] = out.get("num_attention_heads", 4)
    if "use_sliding_window" in fields:
        out |= {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}
        out.pop("layer_types", None)
    if "is_decoder" in fields:
        out["is_decoder"] = True
    return out


def _layers(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Fewer layers, of every kind one; at least two."""
    counts = [key for key in LAYERS if isinstance(fields.get(key), int)]
    if not counts:
        return {}
    count = fields[counts[0]]
    lists = {
        key: value
        for key, value in fields.items()
        if isinstance(value, list | tuple) and len(value) == count > 3 and not _numbered(value)
    }
    if not lists:
        return dict.fromkeys(counts, 2)
    chosen: dict[str, int] = {}
    for layer in range(count):
        chosen.setdefault(repr([value[layer] for value in lists.values()]), layer)
    layers = sorted(chosen.values())[:6]
    for layer in range(count):  # at least two
        if len(layers) < 2 and layer not in layers:
            layers.append(layer)
    layers.sort()
    return {key: [value[layer] for layer in layers] for key, value in lists.items()} | dict.fromkeys(
        counts, len(layers)
    )


def _numbered(values: Sequence[Any]) -> bool:
    """Whether these are numbers of layers, not one value for each layer."""
    return all(isinstance(v, int) and not isinstance(v, bool) for v in values) and len(set(values)) == len(values)


def tiny_architecture(path: str | Path, name: str, seed: int = 0) -> Path:
    """Save a random model of type ``name`` (or of a variant) with the tokenizer of :mod:`rlhf.testing.tiny`.

    Its weights are large, so that log-probs depend visibly on every token before them. Returns ``path``.
    """
    import torch
    from transformers import AutoModelForCausalLM

    from rlhf.testing.tiny import tiny_tokenizer

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(tiny_config(name), dtype=torch.float32)
        with torch.no_grad():
            for parameter in parameters(model):
                draw(parameter)
    model.save_pretrained(str(path))
    return tiny_tokenizer(path)


def parameters(model: Any) -> Iterator[Any]:
    """By name, so that equal seeds give equal weights."""
    for _, parameter in sorted(model.named_parameters()):
        yield parameter


def draw(parameter: Any) -> None:
    """Matrices are drawn anew, with a gain somewhat above one; vectors are moved a little from where they are."""
    import torch

    if parameter.ndim < 2:
        parameter.add_(torch.randn_like(parameter), alpha=0.1)
    else:
        parameter.normal_(0.0, 0.25)
