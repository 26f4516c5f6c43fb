"""Read from a model's ``config.json`` how the model labels steps."""

from __future__ import annotations

from typing import Any

from rlhf.errors import ConfigError, ModelError
from rlhf.steps import STEP_SEPARATOR

from rlhf_plugin_prm.heads import CLASSES, RIGHT_TOKEN, WRONG_TOKEN


def head_of(settings: dict[str, Any], model: str) -> str:
    """``classes:2`` | ``lm``. Raises ModelError for a classification model with another number of labels."""
    if not any("Classification" in name for name in settings.get("architectures") or ()):
        return "lm"
    labels = len(settings.get("id2label") or {0: "", 1: ""})  # transformers writes none where there are two
    if labels != 2:
        raise ModelError(
            f"reward 'prm': {model!r} has {labels} labels; a process reward model has 2 (0 wrong, 1 right), or is a "
            "language model with two label tokens. For a model with one output use --reward model:PATH"
        )
    return CLASSES


def label_ids(settings: dict[str, Any]) -> tuple[int, int] | None:
    """(right, wrong): ids of the label tokens, which training wrote there; None if they are absent."""
    right, wrong = settings.get(RIGHT_TOKEN), settings.get(WRONG_TOKEN)
    return (right, wrong) if isinstance(right, int) and isinstance(wrong, int) else None


def separator_of(settings: dict[str, Any], model: str, separator: str | None) -> str:
    """The text that ends a step: the one that training wrote there, else ``separator``, else a line break.

    Raises ConfigError if both exist and differ: the model was not trained to be read after the given text.
    """
    trained = settings.get(STEP_SEPARATOR)
    if not isinstance(trained, str) or not trained:
        return "\n" if separator is None else separator
    if separator is not None and separator != trained:
        raise ConfigError(
            f"reward 'prm': separator = {separator!r}, but {model!r} was trained on steps that end with {trained!r} "
            f"({STEP_SEPARATOR} in its config.json), and was not trained to be read after other text. Leave separator "
            "out, or train a model on such steps with data.step_separator."
        )
    return trained
