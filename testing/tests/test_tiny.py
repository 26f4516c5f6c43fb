"""Tiny models and the character tokenizer load with transformers and give the expected results."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from rlhf_testing.tiny import CHARS, tiny_model, tiny_reward_model, tiny_tokenizer
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer


@pytest.mark.parametrize("template", [None, "default"])
def test_decode_is_the_exact_inverse_of_encode(tmp_path, template):
    tokenizer = AutoTokenizer.from_pretrained(tiny_tokenizer(tmp_path, chat_template=template))
    for text in (CHARS, " a  b\n\n c ", "\n", "1+1=2<eos>", "<eos><eos>", "don't , do . that ?"):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert tokenizer(text)["input_ids"] == ids
    assert tokenizer.encode("ab") + tokenizer.encode(" c") == tokenizer.encode("ab c")
    assert len(tokenizer.encode(CHARS)) == len(CHARS)
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id) == (0, 1, 2)
    assert tokenizer.encode("é") == [2]
    assert tokenizer.decode(tokenizer.encode("a<eos>"), skip_special_tokens=True) == "a"


def test_the_chat_template_uses_one_token_per_marker(tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(tiny_tokenizer(tmp_path, "hi", "default"))
    messages = [{"role": "user", "content": "hi"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "<|user|>hi<eos><|assistant|>"
    assert len(tokenizer.encode(text)) == 5
    plain = AutoTokenizer.from_pretrained(tiny_tokenizer(tmp_path / "plain", "hi"))
    assert plain.chat_template is None


@pytest.mark.full
def test_making_a_model_prints_nothing(tmp_path):
    """Where DeepSpeed is installed, transformers would import it to save, and it warns of every CPU."""
    code = f"from rlhf_testing.tiny import tiny_model; tiny_model({str(tmp_path)!r}, hidden=16, heads=2, kv_heads=1)"
    environment = {name: value for name, value in os.environ.items() if name != "DS_ACCELERATOR"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout + done.stderr == ""


@pytest.mark.parametrize("architecture", ["qwen3", "llama", "mistral", "gemma2", "gemma3_text"])
@pytest.mark.parametrize("tied", [True, False])
def test_models_load_and_are_seeded(tmp_path, architecture, tied):
    state = torch.random.get_rng_state()
    paths = [
        tiny_model(tmp_path / str(i), architecture=architecture, tied=tied, seed=s) for i, s in enumerate((0, 0, 1))
    ]
    assert torch.equal(state, torch.random.get_rng_state())
    a, b, c = (dict(AutoModelForCausalLM.from_pretrained(p).named_parameters()) for p in paths)
    assert ("lm_head.weight" in a) != tied
    assert all(torch.equal(a[n], b[n]) for n in a)
    assert not all(torch.equal(a[n], c[n]) for n in a)
    tokenizer = AutoTokenizer.from_pretrained(paths[0])
    assert tokenizer.decode(tokenizer.encode("x = 1\n")) == "x = 1\n"


def test_reward_models_have_one_label_and_a_tokenizer(tmp_path):
    path = tiny_reward_model(tmp_path, chars="ab")
    assert AutoModelForSequenceClassification.from_pretrained(path).config.num_labels == 1
    assert len(AutoTokenizer.from_pretrained(path)) == 5


def test_an_architecture_that_replaces_the_tokenizer_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"'qwen2'.*use 'qwen3' or 'llama'"):
        tiny_model(tmp_path, architecture="qwen2")
