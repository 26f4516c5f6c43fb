"""Names and options of the cases of :mod:`zero_pair`. Importing this module runs no case."""

from __future__ import annotations

from typing import Any

from rlhf_testing.token_parts import CASES, IN_EVERY_RUN

STAGES = (0, 1, 2, 3)

DORA: dict[str, Any] = {"rank": 4, "use_dora": True, "use_rslora": True, "modules_to_save": ("lm_head",)}

VARIANTS: dict[str, dict[str, Any]] = {
    "checkpointing-3": {"stage": 3, "gradient_checkpointing": True, "logits_chunk": 500},
    "whole-3": {"stage": 3, "keep_whole": 100, "gathered": 2**27},
    "bucket-2": {"stage": 2, "bucket": 1000},
    "bucket-3": {"stage": 3, "bucket": 1000},
    "hpz-3": {"stage": 3, "hpz_partition_size": 2},
    "host-2": {"stage": 2, "offload_optimizer": "cpu"},
    "host-3": {"stage": 3, "offload_optimizer": "cpu", "offload_params": "cpu"},
    "muon-2": {"stage": 2, "optimizer": "muon", "weight_decay": 0.1},
    "muon-3": {"stage": 3, "optimizer": "muon", "weight_decay": 0.1},
    "lora-2": {"stage": 2, "lora": {"rank": 4}, "ema_decay": 0.9},
    "lora-3": {"stage": 3, "lora": {"rank": 4}, "gradient_checkpointing": True},
    "dora-3": {"stage": 3, "lora": DORA, "gradient_checkpointing": True},
    "bf16-2": {"stage": 2, "dtype": "bf16"},
    "bf16-3": {"stage": 3, "dtype": "bf16", "gradient_checkpointing": True},
    "stored-2": {"stage": 2, "dtype": "bf16", "storage": "bf16"},
    "stored-3": {"stage": 3, "dtype": "bf16", "storage": "bf16"},
    "stored-hpz-3": {"stage": 3, "dtype": "bf16", "storage": "bf16", "hpz_partition_size": 2},
    "stored-lora-3": {"stage": 3, "dtype": "bf16", "storage": "bf16", "lora": {"rank": 4}},
}
"""Options added to those of the cases ``equal-STAGE``; ``dtype``, ``storage`` and ``gradient_checkpointing`` are the
role's."""

IMAGES: dict[str, dict[str, Any]] = {
    "2": {"stage": 2},
    "3": {"stage": 3},
    "frozen-3": {"stage": 3, "freeze_vision": True, "ema_decay": 0.9},
}
"""Options of the cases with an image-text model."""

_SLOW_VARIANTS = (
    "checkpointing-3", "whole-3", "bucket-3", "hpz-3", "host-3", "muon-3", "dora-3", "stored-2", "stored-hpz-3",
    "stored-lora-3",
)  # fmt: skip
PARTS_STAGE = {"adapters": 2, "one key head": 2, "recomputed adapters": 1, "critic": 0, "experts": 2}
"""The stage of a case of :mod:`rlhf_testing.token_parts`, if it is not 3."""
PARTS_ALWAYS = (*IN_EVERY_RUN, "adapters")
"""The cases of :mod:`rlhf_testing.token_parts` in ``make test``."""
ONLY_FULL = (
    "hpz", "parts-resume", *(f"images-{name}" for name in IMAGES), *(f"variant-{name}" for name in _SLOW_VARIANTS),
    *(f"parts-2-{name}" for name in CASES if name not in PARTS_ALWAYS),
)  # fmt: skip
"""Cases that only tests marked ``full`` read. The ranks run them when such a test is selected."""
