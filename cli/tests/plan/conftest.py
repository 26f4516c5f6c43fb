"""Configs of published models, written as ``config.json`` and nothing else."""

from __future__ import annotations

from typing import Any

import pytest

PUBLISHED: dict[str, tuple[str, dict[str, Any]]] = {
    "8B": ("llama", {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": False, "max_position_embeddings": 8192,
    }),
    "7B": ("llama", {
        "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 32, "vocab_size": 32000, "tie_word_embeddings": False, "max_position_embeddings": 4096,
    }),
    "70B": ("llama", {
        "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64,
        "num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": False, "max_position_embeddings": 8192,
    }),
    "0.6B": ("qwen3", {
        "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "tie_word_embeddings": True,
    }),
    "8x7B": ("mixtral", {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "vocab_size": 32000, "num_local_experts": 8, "num_experts_per_tok": 2,
        "tie_word_embeddings": False,
    }),
    "30B-A3B": ("qwen3_moe", {
        "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768, "num_hidden_layers": 48,
        "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936,
        "num_experts": 128, "num_experts_per_tok": 8, "tie_word_embeddings": False,
    }),
    "671B": ("deepseek_v3", {}),
    "gpt2": ("gpt2", {}),
}  # fmt: skip
"""{name: (model_type, fields of its config)}: Llama 3 8B and 70B, Llama 2 7B, Qwen3 0.6B and 30B-A3B, Mixtral 8x7B,
DeepSeek V3."""


@pytest.fixture(scope="session")
def published(tmp_path_factory):
    """``published(name)``: a folder with the ``config.json`` of that model."""
    from transformers import AutoConfig

    folder = tmp_path_factory.mktemp("configs")

    def config_only(name: str) -> str:
        kind, fields = PUBLISHED[name]
        path = folder / name
        if not path.exists():
            AutoConfig.for_model(kind, **fields).save_pretrained(str(path))
        return str(path)

    return config_only
