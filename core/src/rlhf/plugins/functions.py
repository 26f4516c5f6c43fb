"""A plain function as a reward: ``function(prompt, completion, row) -> float | None``, called for each sample."""

from __future__ import annotations

import inspect
import math
import numbers
from collections.abc import Callable, Mapping
from typing import Any

from rlhf.errors import RewardError, shown

SAMPLE_PARAMETERS = ("prompt", "completion", "row")
"""``def NAME(prompt: str, completion: str, row: Mapping) -> float | None``, plain or async."""


def is_async(function: Callable[..., Any]) -> bool:
    """Whether a function, or the ``__call__`` of an object, is ``async def``."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def reward_of_samples(
    function: Callable[..., Any], *, name: str, class_name: str, module: str, label: str
) -> type[Any]:
    """A Reward class that calls ``function`` for each sample. Its ``score`` is ``async`` if the function is.

    Args:
        name: of the reward.
        class_name, module: ``__qualname__`` and ``__module__`` of the class.
        label: name of the function in messages.
    """
    from rlhf.interfaces import Reward
    from rlhf.types import Group, RewardResult, Trajectory

    def arguments(t: Trajectory) -> tuple[str, str, Mapping[str, Any]]:
        return t.prompt_text, t.completion, t.row.columns

    def score(self: Any, group: Group) -> list[RewardResult]:
        return [RewardResult(reward_value(function(*arguments(t)), label)) for t in group.trajectories]

    async def score_async(self: Any, group: Group) -> list[RewardResult]:
        return [RewardResult(reward_value(await function(*arguments(t)), label)) for t in group.trajectories]

    body = {
        "name": name,
        "per_sample": True,
        "reads": "text",
        "__module__": module,
        "__doc__": function.__doc__ or f"Scores each trajectory with {label}({', '.join(SAMPLE_PARAMETERS)}).",
        "made_from": staticmethod(function),
        "score": score_async if is_async(function) else score,
    }
    return type(class_name, (Reward,), body)


def reward_value(value: Any, label: str, where: str = "") -> float | None:
    """A reward function's return value for a sample, checked: a finite number or None.

    Args:
        label: name of the function in messages.
        where: which of several samples the value is for, in messages.

    Raises RewardError otherwise.
    """
    if value is None:
        return None
    try:
        number = float(value) if isinstance(value, numbers.Real) else math.nan
    except OverflowError:  # an integer that is too large for a float
        number = math.inf
    if not math.isfinite(number):
        raise RewardError(f"{label} returned {shown(value)}{where}; expected a finite number or None")
    return number
