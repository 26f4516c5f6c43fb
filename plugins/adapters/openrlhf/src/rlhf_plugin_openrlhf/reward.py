"""``reward_func(queries, prompts, labels)`` as a reward."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from rlhf.interfaces import ComponentConfig, Reward
from rlhf.types import Group, RewardResult, Trajectory

from rlhf_plugin_openrlhf.values import label_of, logs, scalar

CLASS_NAME = "OpenRLHFReward"


class RewardConfig(ComponentConfig):
    label: str | None = None
    """Row column that ``labels`` holds. If absent: ``label``, else ``answer``, else an empty text."""


def reward_class(module: ModuleType, function: Callable[..., Any]) -> type[Reward]:
    """A Reward class in the file's module. It calls the function once per sample, with lists of one element, like
    OpenRLHF, for all samples at the same time. A plain ``def`` function runs in worker processes."""

    def arguments(self: Any, t: Trajectory) -> tuple[list[str], list[str], list[Any]]:
        return [t.prompt_text + t.completion], [t.prompt_text], [label_of(t.row, self.config.label)]

    def score(self: Any, group: Group) -> list[RewardResult]:
        return [_result(function(*arguments(self, t))) for t in group.trajectories]

    async def score_async(self: Any, group: Group) -> list[RewardResult]:
        return [_result(await function(*arguments(self, t))) for t in group.trajectories]

    def columns(self: Any) -> tuple[str, ...]:
        return () if self.config.label is None else (self.config.label,)

    body = {
        "__module__": module.__name__,
        "__doc__": function.__doc__ or f"{function.__name__} of {module.__file__}.",
        "Config": RewardConfig,
        "per_sample": True,
        "reads": "text",
        "columns": columns,
        "score": score_async if inspect.iscoroutinefunction(function) else score,
    }
    return type(CLASS_NAME, (Reward,), body)


def _result(returned: Any) -> RewardResult:
    """Converts ``{rewards, scores, extra_logs}``, or the reward alone, which older files return."""
    if not isinstance(returned, Mapping):
        return RewardResult(scalar(returned, "the reward"))
    if "rewards" not in returned:
        raise TypeError(f"the dict returned has the keys {sorted(returned)}; expected 'rewards'")
    value = scalar(returned["rewards"], "rewards")
    score = scalar(returned.get("scores"), "scores")
    return RewardResult(value, score, info=logs(returned.get("extra_logs"), "extra_logs"))
