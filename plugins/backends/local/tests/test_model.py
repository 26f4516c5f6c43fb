"""Loading: heads, seeds, tied weights, and what is refused."""

from __future__ import annotations

import json

import pytest
import torch
from rlhf.errors import ModelError
from rlhf.interfaces import ModelSpec
from rlhf.types import RoleSpec
from rlhf_modeling.model import load_model
from rlhf_testing.image_models import tiny_image_model
from rlhf_testing.tiny import tiny_model, tiny_reward_model
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForTokenClassification,
    GPT2Config,
    GraniteForCausalLM,
    OPTConfig,
)

from tests.support.tiny_architectures import random_model, tiny_config

CPU = torch.device("cpu")


def load(path, head="lm", seed=0, trained=True):
    return load_model(ModelSpec(RoleSpec("critic", head, trained), str(path), seed=seed), CPU)


def test_weights_are_fp32_whatever_the_file_holds(tmp_path):
    path = tiny_model(tmp_path)
    weights = load_file(path / "model.safetensors")
    save_file({k: v.bfloat16() for k, v in weights.items()}, path / "model.safetensors", {"format": "pt"})
    assert {p.dtype for p in load(path).module.parameters()} == {torch.float32}


@pytest.mark.parametrize("tied", [True, False])
def test_tied_embeddings_are_one_tensor(tmp_path, tied):
    model = load(tiny_model(tmp_path, tied=tied))
    assert (model.head.weight is model.body.embed_tokens.weight) == tied


def test_a_fresh_scalar_head_is_seeded_and_leaves_random_state_alone(model_path):
    torch.manual_seed(5)
    state = torch.random.get_rng_state()
    a, b, c = load(model_path, "scalar"), load(model_path, "scalar"), load(model_path, "scalar", seed=1)
    assert torch.equal(state, torch.random.get_rng_state())
    assert torch.equal(a.head.weight, b.head.weight)
    assert not torch.equal(a.head.weight, c.head.weight)
    assert a.head.weight.shape == (1, 32)
    assert 0 < a.head.weight.std() < 0.1
    assert load(model_path, "classes:3").head.weight.shape == (3, 32)


@pytest.mark.parametrize("head", ["scalar", "classes:2"])
def test_a_role_that_is_not_trained_gets_no_fresh_head(tmp_path, head):
    path = tiny_model(tmp_path)
    message = rf"role 'critic' is a Qwen3ForCausalLM, which has no trained '{head}' head, and this run does not train"
    with pytest.raises(ModelError, match=message):
        load(path, head, trained=False)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "architectures": None}))
    with pytest.raises(ModelError, match=r"is a qwen3, which has no trained"):
        load(path, head, trained=False)
    assert load(path, head).fresh_head


def test_a_reward_model_keeps_its_head(tmp_path):
    path = tiny_reward_model(tmp_path)
    for trained in (True, False):
        head = load(path, "scalar", trained=trained).head
        assert torch.equal(head.weight, load_file(path / "model.safetensors")["score.weight"])
    with pytest.raises(ModelError, match="has 1 labels, but the role's head is 'classes:2'"):
        load(path, "classes:2")


def test_a_model_of_openrlhf_keeps_its_head(tmp_path):
    """Its class is RewardModel or CriticModel, and its config has no number of labels."""
    path = tiny_reward_model(tmp_path)
    config = json.loads((path / "config.json").read_text()) | {"architectures": ["RewardModel"]}
    labels = ("id2label", "label2id", "num_labels")
    (path / "config.json").write_text(json.dumps({name: config[name] for name in config if name not in labels}))
    for trained in (True, False):
        model = load(path, "scalar", trained=trained)
        assert torch.equal(model.head.weight, load_file(path / "model.safetensors")["score.weight"])
        assert not model.fresh_head
    with pytest.raises(ModelError, match="is a RewardModel, which has no trained 'classes:2' head"):
        load(path, "classes:2", trained=False)


def test_a_token_classification_model_keeps_its_head_and_bias(tmp_path):
    config = AutoConfig.from_pretrained(tiny_model(tmp_path), num_labels=2)
    plain = AutoModelForTokenClassification.from_config(config).eval()
    with torch.no_grad():
        plain.score.bias.copy_(torch.tensor([0.5, -3.0]))
    plain.save_pretrained(tmp_path)
    model = load(tmp_path, "classes:2")
    ids_N = torch.tensor([5, 9, 7, 3])
    with torch.no_grad():
        expected_NC = plain(ids_N[None], use_cache=False).logits[0]
        got_NC = model.logits(model.hidden(ids_N, torch.arange(4), [4]))
    assert torch.allclose(got_NC, expected_NC, atol=1e-5)
    assert not model.fresh_head


@pytest.mark.parametrize("tied", [True, False])
def test_a_language_model_role_refuses_a_reward_model(tmp_path, tied):
    with pytest.raises(ModelError, match=r"'critic' is a Qwen3ForSequenceClassification, which does not generate text"):
        load(tiny_reward_model(tmp_path, tied=tied))


def test_missing_and_damaged_models_say_what_is_expected(tmp_path):
    with pytest.raises(
        ModelError, match=r"the folder '/nowhere/x' for the model of role 'critic' does not exist. Expected a folder"
    ):
        load("/nowhere/x")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match=r"(?s)cannot load the model .*empty.*Expected a folder"):
        load(tmp_path / "empty")
    path = tiny_model(tmp_path / "cut")
    data = (path / "model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes(data[: len(data) // 2])
    with pytest.raises(ModelError, match=r"(?s)cannot load the model .*A file of weights is damaged or incomplete"):
        load(path)
    data = (tiny_model(tmp_path / "integers") / "model.safetensors").read_bytes()
    offset = data.index(b'"model.norm.weight":{"dtype":"F32"')
    (tmp_path / "integers" / "model.safetensors").write_bytes(
        data[:offset] + data[offset:].replace(b'"F32"', b'"I32"', 1)
    )
    with pytest.raises(ModelError, match=r"stores 'model.norm.weight' as integers \(I32\)"):
        load(tmp_path / "integers")
    with pytest.raises(ModelError, match="head 'vector' is not known"):
        load(path, "vector")


def test_a_checkpoint_with_missing_weights_is_refused(tmp_path):
    path = tiny_model(tmp_path)
    weights = load_file(path / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    for head in ("lm", "scalar"):
        with pytest.raises(ModelError, match=r"lacks 1 weights .*layers.1.mlp.up_proj.weight"):
            load(path, head)


def test_final_softcapping_and_scaling_are_applied_and_anything_else_refused(tmp_path, monkeypatch):
    soft = tiny_model(tmp_path / "soft", architecture="gemma2", final_logit_softcapping=2.0, query_pre_attn_scalar=8)
    assert load(soft).softcap == 2.0  # checked against the model's own logits while loading
    config = tiny_config("gemma4")  # of text and images
    config.text_config.final_logit_softcapping = 2.0
    assert load(random_model(tmp_path / "parts", config)).softcap == 2.0
    path = tiny_image_model(tmp_path / "no cap", "llava", final_logit_softcapping=2.0)  # its class does not apply it
    assert load(path).softcap is None
    granite = tiny_model(tmp_path / "granite", architecture="granite", logits_scaling=4.0)
    assert load(granite).logit_scale == 0.25
    monkeypatch.setattr(GraniteForCausalLM, "get_output_embeddings", lambda self: ScaledHead(8, 8))
    with pytest.raises(ModelError, match="does not consist of a body and one linear language-model head"):
        load(granite)
    monkeypatch.undo()
    monkeypatch.setattr(GraniteForCausalLM, "forward", squared(GraniteForCausalLM.forward))
    with pytest.raises(ModelError, match="does more to its logits than a linear head, a factor from its config"):
        load(granite)


class ScaledHead(nn.Linear):
    def forward(self, input):
        return 2 * super().forward(input)


def squared(forward):
    def squaring(self, *args, **kwargs):
        out = forward(self, *args, **kwargs)
        out.logits = out.logits.square()
        return out

    return squaring


def test_end_tokens_of_generation_config_and_tokenizer_are_joined(tmp_path, make_trainer):
    path = tiny_model(tmp_path)
    config = json.loads((path / "generation_config.json").read_text())
    (path / "generation_config.json").write_text(json.dumps({**config, "eos_token_id": [7, 9]}))
    assert make_trainer(path).eos_token_ids == (7, 9, 1)


@pytest.mark.parametrize(
    "config",
    [
        GPT2Config(vocab_size=99, n_embd=16, n_layer=1, n_head=2, n_positions=12),
        OPTConfig(
            vocab_size=99,
            hidden_size=16,
            ffn_dim=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            max_position_embeddings=12,
            word_embed_proj_dim=16,
        ),
    ],
    ids=["gpt2", "opt"],
)
def test_more_tokens_than_learned_positions_are_refused(config, tmp_path):
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    model = load(tmp_path)
    assert model.positions == 12
    model.require_positions([3, 12])
    with pytest.raises(ModelError, match=r"has 13 tokens, but .* 12 positions only\. Set data\.max_tokens = 12"):
        model.require_positions([3, 13])


def test_rotary_positions_have_no_limit(model_path):
    model = load(model_path)
    assert model.positions is None
    model.require_positions([10**6])


def test_a_trainer_refuses_sequences_beyond_its_positions(make_trainer, make_batch, nll):
    trainer = make_trainer()
    trainer.loaded_model.positions = 5
    trainer.accumulate([make_batch((5, 4), 0, nll)], nll, {}, {})
    with pytest.raises(ModelError, match="a sequence has 6 tokens"):
        trainer.accumulate([make_batch((6, 4), 0, nll)], nll, {}, {})
