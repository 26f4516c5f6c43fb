"""Architectures that people train: log-probs and gradients through a trainer are those of transformers alone."""

from __future__ import annotations

import json
import sys

import pytest
import transformers
from packaging.version import Version

from tests.pages import DOCS
from tests.support.tiny_architectures import causal_types
from tests.support.tiny_sizes import NOT_BUILT, OVERRIDES, VARIANTS

sys.path.insert(0, str(DOCS / "reference"))
from one_architecture import CLOSE, main, measure

TRAINED = [
    "bloom", "deepseek_v3", "emu3", "falcon_h1", "gemma3_text", "gpt_oss", "llama", "llama4_text", "mamba2", "opt",
    "qwen3_moe", "qwen3_next", "qwen4_exp",
]  # fmt: skip
SIMILAR = [
    "falcon", "gemma2", "glm4", "gpt_neox", "granitemoehybrid", "lfm2", "mistral", "nemotron_h", "olmo2", "phi3",
    "qwen2", "qwen3", "qwen3_5", "qwen3_5_text", "smollm3",
]  # fmt: skip
"""Types whose layers reach the same code of trainers as those of ``TRAINED``."""
NEWER = {"dory", "dots3_note", "inkling2_loop_text", "inkling2_text"}
"""Types that are in transformers 5.24 and not in 5.19."""
WITH_OPTIONS = ["granitemoehybrid with logits_scaling", "llama with dynamic rope", "phi3 with longrope"]


@pytest.mark.parametrize("name", [*TRAINED, *WITH_OPTIONS, *(pytest.param(n, marks=pytest.mark.full) for n in SIMILAR)])
def test_logprobs_and_gradients_are_those_of_transformers_alone(name, tmp_path):
    row = measure(name, tmp_path)
    assert row["verdict"] == "right", row
    assert row["context"] > 100 * CLOSE, "the tiny model must depend on what came before"


def test_a_config_of_the_hub_becomes_a_line_of_the_page(tmp_path, capsys):
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 2048, "intermediate_size": 8192,
        "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64,
        "vocab_size": 128256, "torch_dtype": "bfloat16", "eos_token_id": [128001, 128008, 128009],
        "rope_scaling": {
            "rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    }  # fmt: skip
    code, text = probed(config, tmp_path, capsys, "torch,transformers")
    assert code == 0, text
    assert "num_attention_heads 8, num_key_value_heads 2" in text
    assert "| `llama` | packed | yes | not run | not run | yes | not run |" in text
    fields = json.loads((tmp_path / "model" / "config.json").read_text())
    assert (fields["hidden_size"], fields["intermediate_size"], fields["head_dim"]) == (256, 1024, 32)


def test_a_refused_config_is_a_line_with_the_reason(tmp_path, capsys):
    code, text = probed({"model_type": "rembert"}, tmp_path, capsys, "torch,transformers")
    assert code == 0, "refused in words"
    assert "| `rembert` |  | refused | not run | not run | refused | not run |" in text
    assert "torch: the model does more to its logits than a linear head" in text
    assert "Traceback" not in text


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('{"model_type"', "cannot be read as JSON"),
        ("[]", "has no text in model_type"),
        ('{"model_type": "t5"}', "model_type 't5' is no causal language model of transformers"),
        ('{"model_type": "musicgen"}', "writes several audio codes a step"),
        ('{"model_type": "llama", "hidden_size": "wide"}', "transformers makes no small 'llama' of it"),
    ],
)
def test_what_is_no_config_of_a_language_model_is_refused(content, words, tmp_path, capsys):
    code, text = probed(content, tmp_path, capsys, "torch")
    assert code == 2
    assert words in text
    assert not (tmp_path / "model").exists()


def probed(config, tmp_path, capsys, parts: str) -> tuple[int, str]:
    """The exit code of the command and what it prints."""
    path = tmp_path / "config.json"
    path.write_text(config if isinstance(config, str) else json.dumps(config))
    code = main([str(path), "--parts", parts, "--folder", str(tmp_path / "model")])
    out, err = capsys.readouterr()
    return code, out + err


def test_every_named_type_exists():
    names = set(OVERRIDES) | set(NOT_BUILT) | {kind for kind, _ in VARIANTS.values()} | set(TRAINED + SIMILAR)
    is_newest = Version(transformers.__version__) >= Version("5.24")
    assert names - set(causal_types()) <= (set() if is_newest else NEWER)
