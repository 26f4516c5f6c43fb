"""Names, options and trainers that the tests and the two ranks of :mod:`fsdp_pair` have in common."""

from __future__ import annotations

from typing import Any

from rlhf.interfaces import ModelSpec
from rlhf_plugin_fsdp.trainer import FsdpTrainer

DORA: dict[str, Any] = {"rank": 4, "use_dora": True, "use_rslora": True, "modules_to_save": ("lm_head",)}
STORED: dict[str, Any] = {"dtype": "bf16", "storage": "bf16"}

VARIANTS: dict[str, dict[str, Any]] = {
    "whole": {"reshard_after_forward": False},
    "checkpointing": {"gradient_checkpointing": True, "logits_chunk": 500},
    "muon": {"optimizer": "muon", "weight_decay": 0.1},
    "lora": {"lora": {"rank": 4}, "ema_decay": 0.9},
    "lora-checkpointing": {"lora": {"rank": 4}, "gradient_checkpointing": True},
    "dora": {"lora": DORA, "gradient_checkpointing": True},
    "bf16": {"dtype": "bf16"},
    "bf16-checkpointing": {"dtype": "bf16", "gradient_checkpointing": True, "head_fp32": False},
    "stored": STORED,
    "stored-checkpointing": {**STORED, "gradient_checkpointing": True},
    "stored-lora": {**STORED, "lora": {"rank": 4}},
    "stored-muon": {**STORED, "optimizer": "muon"},
}
"""Options added to those of the case ``equal``; those in :data:`OF_ROLE` are the role's."""
IMAGES: dict[str, dict[str, Any]] = {
    "whole": {},
    "frozen": {"freeze_vision": True, "ema_decay": 0.9},
    "lora": {"lora": {"rank": 4}},
}
"""Options of the cases with an image-text model."""
OF_ROLE = ("gradient_checkpointing", "dtype", "storage")


def trainer(of: ModelSpec, **options: Any) -> FsdpTrainer:
    return FsdpTrainer(FsdpTrainer.Config(**{"lr": 1e-3, "device": "cpu", "timeout": 120.0, **options}), of)
