"""Parameters, widths and cache of published models, from config.json alone."""

from __future__ import annotations

import pytest
from rlhf.errors import ModelError
from rlhf.plan import read_shape
from rlhf.testing.tiny import tiny_model

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
    shape = read_shape(published(name))
    assert (shape.parameters, shape.cache_elements, shape.tied) == EXPECTED[name]


def test_a_scalar_head_replaces_the_language_models(published):
    path = published("8B")
    shape, critic = read_shape(path), read_shape(path, "scalar")
    assert critic.parameters == shape.parameters - 128256 * 4096 + 4096
    assert critic.outputs == 1
    assert read_shape(path, "classes:3").parameters == critic.parameters + 2 * 4096
    tied = published("0.6B")
    assert read_shape(tied, "scalar").parameters == read_shape(tied).parameters + 1024


def test_layers_know_what_a_token_goes_through(published):
    dense = read_shape(published("8B")).layers[0]
    assert (dense.query, dense.key, dense.value, dense.ffn, dense.gated, dense.routed) == (
        4096, 1024, 1024, 14336, True, 0,
    )  # fmt: skip
    experts = read_shape(published("30B-A3B")).layers[0]
    assert (experts.ffn, experts.routed, experts.normed) == (8 * 768, 8, True)
    first, last = (read_shape(published("671B")).layers[i] for i in (0, -1))
    assert (first.ffn, first.routed) == (18432, 0)
    assert (last.ffn, last.routed) == ((8 + 1) * 2048, 8)
    assert (last.query, last.value) == (128 * (128 + 64), 128 * 128)
    assert read_shape(published("gpt2")).layers[0].gated is False


def test_counts_are_those_of_the_loaded_model(tmp_path):
    from transformers import AutoModelForCausalLM

    for architecture in ("qwen3", "llama", "gemma2", "mixtral"):
        path = tiny_model(tmp_path / architecture, architecture=architecture)
        loaded = AutoModelForCausalLM.from_pretrained(str(path))
        assert read_shape(str(path)).parameters == sum(p.numel() for p in loaded.parameters())


def test_adapters_are_counted_as_peft_makes_them(tmp_path):
    from rlhf.modeling.adapters import LoraOptions, add_adapters, is_adapter
    from transformers import AutoModelForCausalLM

    path = tiny_model(tmp_path / "model")
    for targets in (None, ("q_proj", "v_proj")):
        module = AutoModelForCausalLM.from_pretrained(str(path))
        add_adapters(module, module.lm_head, LoraOptions(rank=4, targets=targets), 0)
        made = sum(p.numel() for n, p in module.named_parameters() if is_adapter(n))
        assert read_shape(str(path)).adapter_parameters(4, targets) == made


def test_what_cannot_be_planned_says_why(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match=r"no config\.json in .*empty\. Expected a folder with a config\.json"):
        read_shape(str(tmp_path / "empty"))
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text('{"model_type": "no_such_thing"}')
    with pytest.raises(ModelError, match="cannot plan with the model"):
        read_shape(str(tmp_path / "broken"))
