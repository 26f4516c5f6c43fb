"""``reward_func(queries, prompts, labels)`` as a reward."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any, Literal

from rlhf.interfaces import ComponentConfig, Reward
from rlhf.types import Group, RewardResult

from rlhf_plugin_openrlhf.values import batch_logs, label_of, scalars

CLASS_NAME = "OpenRLHFReward"


class RewardConfig(ComponentConfig):
    label: str | None = None
    """Row column that ``labels`` holds. If absent: ``label``, else ``answer``, else an empty text."""
    batch: Literal["group", "sample"] = "group"
    """Input of one call: the samples of a prompt, or one sample."""


def reward_class(module: ModuleType, function: Callable[..., Any]) -> type[Reward]:
    """A Reward class in the file's module. It calls the function once per group, so that the function may compare the
    samples of a prompt, or once per sample. A plain ``def`` function runs in worker processes."""

    def init(self: Any, config: RewardConfig | None = None) -> None:
        Reward.__init__(self, config)
        self.per_sample = self.config.batch == "sample"

    def arguments(self: Any, group: Group) -> tuple[list[str], list[str], list[Any]]:
        samples = group.trajectories
        queries = [t.prompt_text + t.completion for t in samples]
        return queries, [t.prompt_text for t in samples], [label_of(t.row, self.config.label) for t in samples]

    def score(self: Any, group: Group) -> list[RewardResult]:
        return _results(function(*arguments(self, group)), len(group.trajectories))

    async def score_async(self: Any, group: Group) -> list[RewardResult]:
        return _results(await function(*arguments(self, group)), len(group.trajectories))

    def columns(self: Any) -> tuple[str, ...]:
        return () if self.config.label is None else (self.config.label,)

    body = {
        "__module__": module.__name__,
        "__doc__": function.__doc__ or f"{function.__name__} of {module.__file__}.",
        "Config": RewardConfig,
        "reads": "text",
        "__init__": init,
        "columns": columns,
        "score": score_async if inspect.iscoroutinefunction(function) else score,
    }
    return type(CLASS_NAME, (Reward,), body)


def _results(returned: Any, count: int) -> list[RewardResult]:
    """Converts ``{rewards, scores, extra_logs}``, or the rewards alone, which older files return."""
    answer = returned if isinstance(returned, Mapping) else {"rewards": returned}
    if "rewards" not in answer:
        raise TypeError(f"the returned dict has the keys {sorted(answer)}; expected 'rewards'")
    values = scalars(answer["rewards"], "rewards", count)
    if count == 1 and values[0] is not None and math.isnan(values[0]):
        raise ValueError(
            "rewards is nan. The batch holds one sample, and the standard deviation of one number is nan. A function "
            "that compares samples needs sampling.samples_per_prompt (in evaluations eval.samples) above 1, and no "
            'batch = "sample".'
        )
    scores = scalars(answer.get("scores"), "scores", count)
    infos = batch_logs(answer.get("extra_logs"), count)
    return [RewardResult(value, score, info=info) for value, score, info in zip(values, scores, infos, strict=True)]
