"""What a model's ``config.json`` says about how it labels steps."""

from __future__ import annotations

from typing import Any

from rlhf.errors import ModelError

from rlhf_plugin_prm.heads import CLASSES, RIGHT_TOKEN, WRONG_TOKEN


def head_of(settings: dict[str, Any], model: str) -> str:
    """``classes:2`` | ``lm``. Raises ModelError for a classification model with another number of labels."""
    if not any("Classification" in name for name in settings.get("architectures") or ()):
        return "lm"
    labels = len(settings.get("id2label") or {0: "", 1: ""})  # transformers writes none where there are two
    if labels != 2:
        raise ModelError(
            f"reward 'prm': {model!r} has {labels} labels; a process reward model has 2 (0 wrong, 1 right), or is a "
            "language model with two label tokens. A model with one output is a reward of its own: --reward model:PATH"
        )
    return CLASSES


def label_ids(settings: dict[str, Any]) -> tuple[int, int] | None:
    """(right, wrong): the label tokens that training left there."""
    right, wrong = settings.get(RIGHT_TOKEN), settings.get(WRONG_TOKEN)
    return (right, wrong) if isinstance(right, int) and isinstance(wrong, int) else None
