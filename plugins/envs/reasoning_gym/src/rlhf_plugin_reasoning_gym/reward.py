"""The reward: scores answers to rows that hold a question."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache

from rlhf.errors import RewardError, brief
from rlhf.interfaces import Reward
from rlhf.types import Group, RewardResult, Row

from rlhf_plugin_reasoning_gym.task import AnswerConfig, GymEntry, judge


class ReasoningGymReward(Reward):
    """Scores the last turn from 0 to 1, by the scorer of the row's task.

    ``python -m rlhf_plugin_reasoning_gym`` writes the rows: the question is the prompt, and the scorer recreates it
    from the columns ``task``, ``task_config`` and ``seed``.
    """

    name = "reasoning_gym"
    source = "https://github.com/open-thought/reasoning-gym"
    Config = AnswerConfig
    conformance = {
        "columns": {
            "prompt": "Find the Greatest Common Divisor (GCD) of these numbers: 777, 912. "
            "Give only the GCD as your final answer.",
            "task": "gcd",
            "task_config": {"max_numbers": 2},
            "seed": 0,
        }
    }
    per_sample = True

    def columns(self) -> tuple[str, ...]:
        return ("task", "task_config", "seed")

    def score(self, group: Group) -> list[RewardResult]:
        entry = _entry(group.row)
        results = []
        for trajectory in group.trajectories:
            value, info = judge(entry, trajectory.answer, self.config, RewardError)
            results.append(RewardResult(value, info=info))
        return results


def _entry(row: Row) -> GymEntry:
    task, config, seed, prompt = (row.get(name) for name in ("task", "task_config", "seed", "prompt"))
    if not isinstance(task, str) or not isinstance(config, Mapping) or type(seed) is not int:
        raise RewardError(
            f"row {row.index} of source {row.source!r} has task = {brief(task)}, task_config = {brief(config)} and "
            f"seed = {brief(seed)}; allowed: text, a table and a whole number. Write rows with `python -m "
            "rlhf_plugin_reasoning_gym TASK`"
        )
    entry = _gym_entry(task, json.dumps(config, sort_keys=True), seed)
    if isinstance(prompt, str) and entry.question not in prompt:
        raise RewardError(
            f"row {row.index} of source {row.source!r}: task {task!r} with its config and seed {seed} asks "
            f"{brief(entry.question)}, which is not in the row's prompt. The row was written by another version of "
            "reasoning-gym, or edited. Write the rows again"
        )
    return entry


@lru_cache(maxsize=256)
def _gym_entry(task: str, config: str, seed: int) -> GymEntry:
    return GymEntry(task, json.loads(config), seed)
