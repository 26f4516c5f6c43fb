"""Parameters, widths and cache of published models, from config.json alone."""

from __future__ import annotations

import pytest
import torch
from rlhf.errors import ModelError
from rlhf_cli.plan.model_size import read_size
from rlhf_testing.tiny import tiny_model

EXPECTED = {
    # name: (parameters, elements of keys and values per token, tied)
    "8B": (8_030_261_248, 32 * 2 * 8 * 128, False),
    "70B": (70_553_706_496, 80 * 2 * 8 * 128, False),
    "0.6B": (596_049_920, 28 * 2 * 8 * 128, True),
    "8x7B": (46_702_792_704, 32 * 2 * 8 * 128, False),
    "30B-A3B": (30_532_122_624, 48 * 2 * 4 * 128, False),
    "671B": (671_026_404_352, 61 * (512 + 64), False),
    "gpt2": (124_439_808, 12 * 2 * 768, True),
}


@pytest.mark.parametrize("name", EXPECTED)
def test_published_models_are_counted_to_the_parameter(published, name):
    size = read_size(published(name))
    assert (size.parameters, size.cache_elements, size.tied) == EXPECTED[name]


def test_a_scalar_head_replaces_the_language_models(published):
    path = published("8B")
    size, critic = read_size(path), read_size(path, "scalar")
    assert critic.parameters == size.parameters - 128256 * 4096 + 4096
    assert critic.outputs == 1
    assert read_size(path, "classes:3").parameters == critic.parameters + 2 * 4096
    tied = published("0.6B")
    assert read_size(tied, "scalar").parameters == read_size(tied).parameters + 1024


def test_layer_sizes_give_the_widths_for_a_token(published):
    dense = read_size(published("8B")).layers[0]
    assert (dense.query, dense.key, dense.value, dense.ffn, dense.gated, dense.routed) == (
        4096, 1024, 1024, 14336, True, 0,
    )  # fmt: skip
    experts = read_size(published("30B-A3B")).layers[0]
    assert (experts.ffn, experts.routed, experts.normed) == (8 * 768, 8, True)
    first, last = (read_size(published("671B")).layers[i] for i in (0, -1))
    assert (first.ffn, first.routed) == (18432, 0)
    assert (last.ffn, last.routed) == ((8 + 1) * 2048, 8)
    assert (last.query, last.value) == (128 * (128 + 64), 128 * 128)
    assert read_size(published("gpt2")).layers[0].gated is False


def test_a_vision_tower_is_counted(tmp_path):
    from rlhf_modeling.images.architecture import vision_parameters
    from rlhf_testing.image_models import tiny_image_model
    from transformers import AutoModelForImageTextToText

    path = tiny_image_model(tmp_path, "qwen3_vl")
    size, model = read_size(str(path)), AutoModelForImageTextToText.from_pretrained(str(path))
    assert size.parameters == sum(p.numel() for p in model.parameters())
    vision = sum(model.get_parameter(name).numel() for name in vision_parameters(model))
    assert size.vision == vision > 0.3 * size.parameters
    assert size.layer_class == "Qwen3VLTextDecoderLayer"
    assert {name for name, *_ in size.linear} == {
        "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj",
    }  # fmt: skip
    assert read_size(str(path), "scalar").parameters == size.parameters + 64  # the head is tied


def test_counts_are_those_of_the_loaded_model(tmp_path):
    from transformers import AutoModelForCausalLM

    for architecture in ("qwen3", "llama", "gemma2", "mixtral"):
        path = tiny_model(tmp_path / architecture, architecture=architecture)
        model = AutoModelForCausalLM.from_pretrained(str(path))
        assert read_size(str(path)).parameters == sum(p.numel() for p in model.parameters())


def test_adapters_are_counted_as_peft_makes_them(tmp_path):
    from rlhf_modeling.adapters import add_adapters, is_adapter
    from rlhf_modeling.config import LoraOptions
    from transformers import AutoModelForCausalLM

    path = tiny_model(tmp_path / "model")
    for targets in (None, ("q_proj", "v_proj")):
        module = AutoModelForCausalLM.from_pretrained(str(path))
        add_adapters(module, module.lm_head, LoraOptions(rank=4, targets=targets), 0)
        expected = sum(p.numel() for n, p in module.named_parameters() if is_adapter(n))
        assert read_size(str(path)).adapter_parameters(4, targets) == expected


SPARSE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "mlp_only_layers": [0]}
MIXED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "first_k_dense_replace": 1}
LATENT = {"kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16}
VISION = {"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 2,
          "image_size": 28, "patch_size": 14}  # fmt: skip
BASE = {"hidden_size": 64, "intermediate_size": 112, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 300, "max_position_embeddings": 128, "pad_token_id": 0}  # fmt: skip
OLD = {"n_embd": 64, "n_layer": 3, "n_head": 4, "vocab_size": 300, "n_positions": 128}
SMALL = {
    "llama": BASE,
    "llama tied": BASE | {"tie_word_embeddings": True},
    "llama with heads of 22": BASE | {"hidden_size": 66, "num_attention_heads": 3, "num_key_value_heads": 1},
    "llama with biases": BASE | {"attention_bias": True, "mlp_bias": True},
    "qwen2 tied": BASE | {"tie_word_embeddings": True},
    "qwen3": BASE | {"head_dim": 24},
    "mistral": BASE | {"sliding_window": 8},
    "mixtral": BASE | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": BASE | SPARSE | {"head_dim": 24, "mlp_only_layers": []},
    "qwen3_moe with a dense layer": BASE | SPARSE | {"head_dim": 24},
    "qwen2_moe": BASE | SPARSE | {"shared_expert_intermediate_size": 56, "mlp_only_layers": []},
    "gemma2": BASE | {"head_dim": 24},
    "gemma3_text": BASE | {"head_dim": 24},
    "gemma3 with its eyes": {"text_config": BASE | {"head_dim": 24}, "vision_config": VISION, "mm_tokens_per_image": 4},
    "gemma4_text with wider heads in a layer": BASE | {
        "head_dim": 24, "per_layer_config": {"2": {"head_dim": 32}}, "vocab_size_per_layer_input": 300,
        "hidden_size_per_layer_input": 8, "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    },
    "deepseek_v3": BASE | MIXED | LATENT | {"num_key_value_heads": 4, "n_group": 2, "topk_group": 1},
    "glm4_moe": BASE | MIXED | {"n_group": 1, "topk_group": 1, "head_dim": 16},
    "phi": BASE,
    "gpt_neox": BASE,
    "gpt2": OLD,
    "gpt_bigcode": OLD | {"multi_query": True},
    "falcon": {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 300},
    "opt": {"hidden_size": 64, "ffn_dim": 112, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 300,
            "word_embed_proj_dim": 32, "max_position_embeddings": 128},
}  # fmt: skip
"""{model_type and what is particular: fields of its config}."""


@pytest.mark.parametrize("name", SMALL)
def test_the_size_is_that_of_the_model_which_transformers_makes(tmp_path, name):
    """Parameters of every head, what is tied, linear layers, and the cache of a forward pass."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

    AutoConfig.for_model(name.partition(" ")[0], **SMALL[name]).save_pretrained(str(tmp_path))
    size, config = read_size(str(tmp_path)), AutoConfig.from_pretrained(str(tmp_path))
    module = AutoModelForCausalLM.from_config(config).eval()
    embedding, head = module.get_input_embeddings(), module.get_output_embeddings()
    assert size.parameters == count(module)
    assert size.tied == (head.weight is embedding.weight)
    assert (size.embedding, size.head) == (embedding.weight.numel(), head.weight.numel())
    adapted = module.get_decoder() if "eyes" in name else module  # the text part
    linear = [m for m in adapted.modules() if isinstance(m, torch.nn.Linear) and m is not head]
    assert size.adapter_parameters(4) == sum(4 * sum(m.weight.shape) for m in linear)
    with torch.no_grad():
        cache = module(input_ids=torch.arange(5)[None], use_cache=True).past_key_values
    assert size.cache_elements == sum(layer.keys.numel() + layer.values.numel() for layer in cache.layers) / 5
    if type(config) in AutoModelForSequenceClassification._model_mapping and "eyes" not in name:
        scores = AutoModelForSequenceClassification.from_config(AutoConfig.from_pretrained(str(tmp_path), num_labels=3))
        assert read_size(str(tmp_path), "classes:3").parameters == count(scores)


def count(module) -> int:
    return sum(p.numel() for p in module.parameters())


def test_a_classifier_of_tokens_has_biases(tmp_path):
    """A saved token classifier is loaded with biases."""
    from transformers import AutoConfig, AutoModelForTokenClassification

    config = AutoConfig.for_model("llama", **BASE, num_labels=2, architectures=["LlamaForTokenClassification"])
    config.save_pretrained(str(tmp_path))
    model = AutoModelForTokenClassification.from_config(config)
    assert read_size(str(tmp_path), "classes:2").parameters == count(model)


def test_models_that_cannot_be_planned_are_refused_with_the_reason(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match=r"no config\.json in .*empty\. Expected a folder with a config\.json"):
        read_size(str(tmp_path / "empty"))
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text('{"model_type": "no_such_thing"}')
    with pytest.raises(ModelError, match="cannot plan with the model"):
        read_size(str(tmp_path / "broken"))
