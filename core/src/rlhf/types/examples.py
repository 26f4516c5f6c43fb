"""Tokenised rows: what offline algorithms assemble."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from rlhf.types import Row


@dataclass(frozen=True, slots=True)
class Sequence:
    """One tokenised sequence with the mask of the tokens to train on."""

    ids: list[int]
    loss_mask: list[bool]
    role: int = 0
    """0 = demonstration or chosen, 1 = rejected, ..."""


@dataclass(frozen=True, slots=True)
class Example:
    """One data row, tokenised for the algorithm's data form."""

    row: Row
    sequences: list[Sequence]
    values: dict[str, Any] = field(default_factory=dict)
    """Further values of the data form. ``labels``: ``label``, bool. ``pairs``: ``margin``, float, where there is such a
    column. ``steps``: ``steps``, [(position in ``ids`` of the token that ends a step, label in 0..1), ...]."""
