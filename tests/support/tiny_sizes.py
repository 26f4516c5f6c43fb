"""Sizes for :mod:`tests.support.tiny_architectures`: by a field's name, and the exceptions of single types."""

from __future__ import annotations

from typing import Any

WINDOW = 18
"""Tokens of a sliding window, of an attention chunk and of the sparsest attention. The number is larger than the few
tokens that a quick probe of a model reads, as in real models, and smaller than a test's sequences."""
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
        mamba_d_state d_rel dim_head"""),
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
        sliding_window_size keep_window_size index_topk"""),
    (POSITIONS, """max_position_embeddings n_positions max_seq_len context_length max_target_positions n_ctx
        model_max_length rel_extent"""),
    (VOCABULARY - 4, "unpadded_vocab_size"),
    (VOCABULARY, """vocab_size vocab_size_per_layer_input decoder_vocab_size audio_vocab_size ngram_vocab_size_base
        shape_vocab_size pronunciation_vocab_size encoder_hash_byte_group_vocab"""),
]  # fmt: skip
"""(size, the fields that get it)."""
OMIT: Any = object()
"""In :data:`OVERRIDES`: leave the field at its default."""
SHORT_AND_FULL = {"layer_types": ["sliding_attention", "full_attention"]}
COMPASS = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
LLAMA4 = {"interleave_moe_layer_step": 2, "num_experts_per_tok": 1, "floor_scale": 3 * WINDOW}
LLAMA_4_SCALING = {
    "rope_type": "yarn", "rope_theta": 1e4, "factor": 16.0, "original_max_position_embeddings": WINDOW,
    "beta_fast": 32.0, "beta_slow": 1.0, "llama_4_scaling_beta": 0.1,
}  # fmt: skip
QSA = {
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 8,
    "indexer_budget": 16,
    "indexer_compress_ratio": 4,
}
ASSISTANT = {
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 0,
    "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"],
    "num_hidden_layers": 2,
}
OVERRIDES: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
    "blt": {
        "encoder_hash_byte_group_size": [3, 4],
        "encoder_config": {"hidden_size_global": 32},
        "decoder_config": {"hidden_size_global": 32},
    },
    "cohere_compass_text": SHORT_AND_FULL | {"rope_parameters": dict.fromkeys(SHORT_AND_FULL["layer_types"], COMPASS)},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4}, "ffn_config": {"moe_top_k": 2}},
    "deepseek_v4": {"compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": WINDOW}},
    "dory": {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_hidden_layers": 4,
        "n_input_layers": 1,
        "n_recurrent_layers": 2,
        "n_output_layers": 1,
    },
    "dots1": SHORT_AND_FULL,
    "dots3_note": {
        "vision_config": {"adapter_in_dim": 32, "adapter_out_dim": 32},
        "audio_config": {"adapter_input_size": 32, "adapter_out_dim": 32},
    },
    "falcon_h1": {"mamba_d_head": 8, "lm_head_multiplier": 0.5, "key_multiplier": 0.7, "ssm_multipliers": [0.8] * 5},
    "gemma3n_text": {"intermediate_size": [64] * 4, "num_kv_shared_layers": 2},
    "gemma4_assistant": {"text_config": {"model_type": "gemma4_text", **ASSISTANT}},
    "gemma4_text": {"per_layer_config": {"1": {"head_dim": 16}}},
    "gemma4_unified_assistant": {"text_config": {"model_type": "gemma4_unified_text", **ASSISTANT}},
    "gemma4_unified_text": {"per_layer_config": {"1": {"head_dim": 16}}},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "inkling2_loop_text": {
        "layer_types": ["hybrid_sliding", "hybrid"] * 2,
        "num_hidden_layers": 4,
        "n_layers_per_attn_res_block": 1,
        "loop_layer_index_start": 1,
        "loop_layer_index_end": 3,
        "log_scaling_n_floor": WINDOW,
    },
    "inkling2_text": {"log_scaling_n_floor": WINDOW},
    "inkling_text": {"log_scaling_n_floor": WINDOW},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_offset": 0},
    "laguna": SHORT_AND_FULL | {"num_attention_heads_per_layer": [4, 4]},
    "lfm2": {"full_attn_idxs": [1], "num_hidden_layers": 3, "layer_types": OMIT, "block_multiple_of": 16},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv"], "num_hidden_layers": 3},
    "llama4": {"text_config": LLAMA4},
    "llama4_text": LLAMA4,
    "mamba2": {"head_dim": 16},
    "mellum": SHORT_AND_FULL,
    "minimax_m3_vl_text": {
        "layer_types": ["full_attention", "minimax_m3_sparse"],
        "mlp_layer_types": ["dense", "sparse"],
        "index_block_size": 8,
    },
    "ministral": SHORT_AND_FULL,
    "ministral3": {"rope_parameters": LLAMA_4_SCALING},
    "mllama": {"text_config": {"cross_attention_layers": [1]}},
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
"""Fields that :data:`SIZES` does not cover, by type."""

_EVERY_FOURTH = ["sliding_attention"] * 3 + ["full_attention"]
_HYBRID = ["conv", "conv", "full_attention", "conv"]
_COMPASS = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [32, 16, 16]}
_QSA = {
    "indexer_n_heads": 16,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 256,
    "indexer_budget": 2048,
    "indexer_compress_ratio": 4,
}
PUBLISHED: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [9, 18, 27]},
    "cohere_compass_text": {
        "layer_types": _EVERY_FOURTH * 10,
        "rope_parameters": dict.fromkeys(SHORT_AND_FULL["layer_types"], _COMPASS),
    },
    "dbrx": {
        "d_model": 6144, "n_heads": 48, "n_layers": 40, "max_seq_len": 32768, "vocab_size": 100352,
        "attn_config": {"kv_n_heads": 8, "clip_qkv": 8.0, "rope_theta": 5e5},
        "ffn_config": {"ffn_hidden_size": 10752, "moe_num_experts": 16, "moe_top_k": 4},
    },
    "deepseek_v2": {
        "n_routed_experts": 160, "num_experts_per_tok": 6, "n_group": 8, "topk_group": 3,
        "topk_method": "group_limited_greedy", "first_k_dense_replace": 1,
    },
    "dots1": {"n_routed_experts": 128, "n_shared_experts": 2, "num_experts_per_tok": 6, "first_k_dense_replace": 1},
    "falcon_h1": {"lm_head_multiplier": 0.5, "key_multiplier": 0.7, "ssm_multipliers": [0.8] * 5},
    "granitemoehybrid": {"layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 10, "num_hidden_layers": 40},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128, "num_experts": 64, "moe_topk": 8},
    "laguna": {"layer_types": _EVERY_FOURTH * 10},
    "lfm2": {"layer_types": _HYBRID * 8},
    "lfm2_moe": {"layer_types": _HYBRID * 8},
    "mellum": {"layer_types": _EVERY_FOURTH * 7},
    "minimax_m3_vl_text": {
        "layer_types": ["full_attention"] * 3 + ["minimax_m3_sparse"] * 57,
        "mlp_layer_types": ["dense"] * 3 + ["sparse"] * 57,
    },
    "ministral": {"head_dim": 128, "layer_types": _EVERY_FOURTH * 8},
    "nemotron": {"num_key_value_heads": 8},
    "qwen4_exp": {"text_config": _QSA},
    "qwen4_exp_text": _QSA,
    "xmod": {"default_language": "en_XX"},
    "zamba": {"layers_block_type": ["linear_attention", "hybrid"] * 2, "num_hidden_layers": 4},
}  # fmt: skip
"""Fields that a model needs and the defaults of its class lack, by type: as published where that is known."""

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
    "llama with dynamic rope": ("llama", {"rope_parameters": DYNAMIC, "max_position_embeddings": WINDOW}),
    "mixtral with router jitter": ("mixtral", {"router_jitter_noise": 0.1}),
    "phi3 with longrope": (
        "phi3",
        {"rope_parameters": LONGROPE, "original_max_position_embeddings": WINDOW, "max_position_embeddings": 512},
    ),
    "phimoe with input jitter": ("phimoe", {"input_jitter_noise": 0.1}),
    "phimoe with router jitter": ("phimoe", {"router_jitter_noise": 0.1}),
}
"""Options of a config that matter for packing: {name: (type, fields)}."""

NOT_BUILT = {
    "gemma3n": "its vision tower needs timm; `gemma3n_text` is its language model",
    "gemma4_assistant": "a draft model: it reads the keys and values of another model",
    "gemma4_unified_assistant": "a draft model: it reads the keys and values of another model",
    "musicgen": "writes several audio codes a step, no text",
    "musicgen_melody": "writes several audio codes a step, no text",
}
"""Types of which no tiny language model can be made, and why."""
