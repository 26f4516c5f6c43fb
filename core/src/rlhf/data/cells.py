"""Values of columns, checked: conversations, labels, margins, steps."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from rlhf.data.conversation import Message
from rlhf.errors import DataError, did_you_mean
from rlhf.types import Row

LABELS: Mapping[str, bool] = {"true": True, "1": True, "+": True, "false": False, "0": False, "-": False}
"""Texts that are labels, in any case: files without types (csv) have no others."""


def cell(row: Row, column: str) -> Any:
    """The value of a column. Raises DataError naming the columns present."""
    if column not in row.columns:
        raise DataError(
            f"no column {column!r}; columns present: {', '.join(row.columns)}.{did_you_mean(column, row.columns)}"
        )
    return row.columns[column]


def messages_of(row: Row, column: str) -> list[Message]:
    """A conversation."""
    value = cell(row, column)
    if not isinstance(value, list) or not value:
        raise DataError(f"column {column!r}: must be a list of {{role, content}} messages, got {str(value)[:60]!r}")
    for i, message in enumerate(value):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise DataError(f"column {column!r}, message {i}: must be {{role, content}}, got {str(message)[:60]!r}")
        content = message.get("content")
        if not isinstance(content, str) and not (content is None and message.get("tool_calls")):
            raise DataError(f"column {column!r}, message {i}: content must be text, got {str(content)[:60]!r}")
    return list(value)


def hard_label(row: Row, column: str) -> bool:
    """A boolean, 0 or 1, or one of the texts of :data:`LABELS`."""
    found = as_label(cell(row, column))
    if found is None:
        raise DataError(f"column {column!r}: a label is true or false, 1 or 0, '+' or '-', got {_short(row[column])}")
    return found


def as_label(value: Any) -> bool | None:
    """The label that a value is, or None."""
    if isinstance(value, str):
        return LABELS.get(value.strip().lower())
    if isinstance(value, bool | int | float) and value in (0, 1):
        return bool(value)
    return None


def margin(row: Row, column: str) -> float:
    """By how much the chosen answer is better: a finite number, also as text."""
    value = cell(row, column)
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise DataError(f"column {column!r}: a margin is a finite number, got {_short(value)}")
    return number


def texts_of(row: Row, column: str) -> list[str]:
    """The texts of a solution's steps."""
    value = cell(row, column)
    if not isinstance(value, list) or not value:
        raise DataError(f"column {column!r}: must be a list of the texts of steps, got {_short(value)}")
    for number, text in enumerate(value, 1):
        if not isinstance(text, str):
            raise DataError(f"column {column!r}, step {number}: must be text, got {_short(text)}")
    return value


def soft_labels(row: Row, column: str) -> list[float]:
    """A label for each step: a hard one (:func:`hard_label`), or the probability (0 .. 1) that the step is right."""
    value = cell(row, column)
    if not isinstance(value, list):
        raise DataError(f"column {column!r}: must be a list with a label for each step, got {_short(value)}")
    labels = []
    for number, one in enumerate(value, 1):
        hard = as_label(one)
        if hard is None and (not isinstance(one, int | float) or not 0 <= one <= 1):
            raise DataError(
                f"column {column!r}, step {number}: a label is true or false, '+' or '-', or a number from 0 to 1, "
                f"got {_short(one)}"
            )
        labels.append(float(one if hard is None else hard))
    return labels


def _short(value: Any) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}"
