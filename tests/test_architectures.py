"""Architectures that people train: log-probs and gradients through a trainer are those of transformers alone."""

from __future__ import annotations

import sys

import pytest
from rlhf_testing.tiny_architectures import causal_types
from rlhf_testing.tiny_sizes import NOT_BUILT, OVERRIDES, VARIANTS

from tests.pages import DOCS

sys.path.insert(0, str(DOCS / "reference"))
from one_architecture import CLOSE, measure

TRAINED = [
    "bloom", "deepseek_v3", "emu3", "falcon", "falcon_h1", "gemma2", "gemma3_text", "glm4", "gpt_neox", "gpt_oss",
    "granitemoehybrid", "lfm2", "llama", "llama4_text", "mamba2", "mistral", "nemotron_h", "olmo2", "opt", "phi3",
    "qwen2", "qwen3", "qwen3_5", "qwen3_5_text", "qwen3_moe", "qwen3_next", "qwen4_exp", "smollm3",
]  # fmt: skip
WITH_OPTIONS = ["granitemoehybrid with logits_scaling", "llama with dynamic rope", "phi3 with longrope"]


@pytest.mark.parametrize("name", [*TRAINED, *WITH_OPTIONS])
def test_logprobs_and_gradients_are_those_of_transformers_alone(name, tmp_path):
    row = measure(name, tmp_path)
    assert row["verdict"] == "right", row
    assert row["context"] > 100 * CLOSE, "the tiny model must depend on what came before"


def test_a_head_that_does_not_read_the_hidden_states_is_refused(tmp_path):
    row = measure("rembert with published proportions", tmp_path)
    assert row["verdict"] == "refused", row
    assert "does more to its logits than a linear head" in row["failed"]


def test_every_named_type_exists():
    types = set(causal_types())
    assert set(OVERRIDES) | set(NOT_BUILT) | {kind for kind, _ in VARIANTS.values()} | set(TRAINED) <= types
