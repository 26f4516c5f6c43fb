"""The recipes' reward, named by the run files as `file:examples/recipes/reward.py`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def score(prompt: str, completion: str, row: Mapping[str, Any]) -> float:
    """Share of the digits that are at their place in the sorted number; 1 if all are."""
    right = row["answer"]
    return sum(a == b for a, b in zip(completion, right, strict=False)) / max(len(right), len(completion))
