"""``extract_boxed_answer`` and ``grade_answer``, for files that import them. Grading is the reward ``math``'s."""

from __future__ import annotations

import functools
from typing import Any

from rlhf.plugins import Plugins
from rlhf.types import Group, Row, Trajectory, Turn


def extract_boxed_answer(solution: str) -> str | None:
    r"""The content of the last ``\boxed{...}``; None if there is none, or its brace is not closed."""
    start = solution.rfind("\\boxed{")
    if start < 0:
        return None
    depth = 0
    for i in range(start + len("\\boxed"), len(solution)):
        depth += {"{": 1, "}": -1}.get(solution[i], 0)
        if depth == 0:
            return solution[start + len("\\boxed{") : i].strip()
    return None


def grade_answer(given_answer: str | None, ground_truth: str) -> bool:
    """Whether the two answers are equal. Raises PluginNotFound if the reward ``math`` is not installed."""
    if given_answer is None:
        return False
    row = Row({"answer": str(ground_truth)}, "openrlhf", 0)
    answer = Turn([], sampled=True, text="#### " + " ".join(str(given_answer).split()))
    (result,) = _math().score(Group(row, 0, [Trajectory(row, [answer], (0, 0))]))
    return result.value == 1.0


@functools.cache
def _math() -> Any:
    cls = Plugins.discover().resolve("reward", "math").cls
    return cls(cls.Config(extract=("hash",)))
