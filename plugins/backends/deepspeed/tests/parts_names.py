"""Names and options of the cases of :mod:`parts_ranks`. Importing this module runs no case."""

from __future__ import annotations

from typing import Any

STAGES = (0, 1, 2)

VARIANTS: dict[str, dict[str, Any]] = {
    "checkpointing": {"stage": 2, "gradient_checkpointing": True, "logits_chunk": 500},
    "offload": {"stage": 2, "offload_optimizer": "cpu"},
    "bucket": {"stage": 1, "bucket": 1000},
    "clipped": {"stage": 2, "max_grad_norm": 0.1},
    "bf16": {"stage": 2, "dtype": "bf16"},
    "stored": {"stage": 2, "dtype": "bf16", "storage": "bf16"},
}
"""Options added to those of the cases ``equal-STAGE``; ``dtype`` and ``gradient_checkpointing`` are the role's."""

LORA: dict[str, dict[str, Any]] = {
    "all": {"rank": 2, "alpha": 8},
    "some": {"rank": 3, "alpha": 8, "targets": ("q_proj", "o_proj", "down_proj")},
}
LORA_STAGE = {"all": 2, "some": 0}
MUON: dict[str, dict[str, Any]] = {
    "whole": {"stage": 0},
    "lora": {"stage": 2, "lora": {"rank": 2, "alpha": 8}},
}
"""Options of Muon for matrices, and for adapters."""

MODELS: dict[str, dict[str, Any]] = {
    "llama": {"architecture": "llama", "attention_bias": True, "mlp_bias": True, "tied": False},
    "mistral": {"architecture": "mistral", "sliding_window": 8},
    "gemma2": {"architecture": "gemma2", "sliding_window": 8},
    "gemma3": {"architecture": "gemma3_text", "sliding_window": 8},
}
"""Kinds of layers other than those of Qwen 3."""

REFUSED: dict[str, dict[str, Any]] = {
    "heads": {"heads": 3, "kv_heads": 1, "head_dim": 8},
    "dropout": {"attention_dropout": 0.1},
    "layers": {"architecture": "olmo2"},
}
