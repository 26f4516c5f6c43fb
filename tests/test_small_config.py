"""Small models keep the proportions of published ones."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.support.small_config import published_fields, small_config
from tests.support.tiny_architectures import causal_types
from tests.support.tiny_sizes import NOT_BUILT, PUBLISHED

LLAMA = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 8192,
    "torch_dtype": "bfloat16", "eos_token_id": [128001, 128009], "attention_dropout": 0.1,
}  # fmt: skip
MLA = {
    "model_type": "deepseek_v3", "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048,
    "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128, "q_lora_rank": 1536,
    "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128, "n_routed_experts": 256,
    "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4, "first_k_dense_replace": 3,
    "quantization_config": {"quant_method": "fp8"},
}  # fmt: skip


def test_heads_and_widths_keep_their_ratios():
    config = small_config(LLAMA)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (8, 2, 32)
    assert (config.hidden_size, config.intermediate_size) == (256, 896)
    assert (config.num_hidden_layers, config.vocab_size, config.attention_dropout) == (2, 128, 0.0)
    assert config.eos_token_id == 1


def test_parts_of_heads_experts_and_dense_layers_stay():
    config = small_config(MLA)
    assert (config.qk_rope_head_dim, config.qk_nope_head_dim, config.v_head_dim) == (32, 64, 64)
    assert (config.kv_lora_rank, config.q_lora_rank, config.hidden_size) == (8, 24, 112)
    assert config.n_routed_experts % config.n_group == 0
    assert config.num_experts_per_tok == 2
    assert (config.num_hidden_layers, config.first_k_dense_replace) == (2, 1), "one dense layer and one with experts"
    assert getattr(config, "quantization_config", None) is None


def test_an_embedding_of_another_width_stays_another():
    config = small_config(published_fields("rembert"))
    assert len({config.hidden_size, config.input_embedding_size, config.output_embedding_size}) == 3


def test_one_layer_of_every_kind_stays():
    kinds = ["linear_attention"] * 3 + ["full_attention"]
    config = small_config({"model_type": "qwen3_next", "layer_types": kinds * 3, "num_hidden_layers": 12})
    assert config.layer_types == ["linear_attention", "full_attention"]
    config = small_config({"model_type": "gemma3_text"})
    assert set(config.layer_types) == {"sliding_attention", "full_attention"}
    assert config.sliding_window == 18, "sequences of a probe are longer"
    assert len(set(small_config(published_fields("jamba")).layers_block_type)) == 2


def test_fields_of_single_layers_move_with_them():
    fields = {"model_type": "gemma4_text", "num_hidden_layers": 12, "per_layer_config": {"5": {"head_dim": 512}}}
    config = small_config(fields | {"layer_types": ["sliding_attention"] * 5 + ["full_attention"] * 7})
    assert config.to_dict()["per_layer_config"] == {"1": {"head_dim": 64}}


def test_a_config_as_transformers_writes_it_gives_the_same_model():
    full_config = AutoConfig.for_model("gemma3_text").to_dict()
    minimal, complete = (small_config(fields).to_dict() for fields in ({"model_type": "gemma3_text"}, full_config))
    assert minimal == complete


@pytest.mark.full
@pytest.mark.parametrize("kind", sorted(set(causal_types()) - set(NOT_BUILT) - {"reformer"}))
def test_every_type_has_a_small_model(kind):
    config = small_config(published_fields(kind))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert model.num_parameters() < 6e7


def test_every_named_type_exists():
    assert set(PUBLISHED) <= set(causal_types())
