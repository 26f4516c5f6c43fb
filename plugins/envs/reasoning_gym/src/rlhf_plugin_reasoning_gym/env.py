"""The environment: one question, one answer, one score."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field, model_validator
from rlhf.errors import EnvError, brief
from rlhf.interfaces import Env
from rlhf.types import EnvStep, Row

from rlhf_plugin_reasoning_gym.task import MOST_SEED, AnswerConfig, GymEntry, check, judge


class ReasoningGymConfig(AnswerConfig):
    """The task, and how an answer is read."""

    task: str | None = None
    """Name of a task, such as ``chain_sum``; ``composite`` mixes several. A row's column ``task`` takes precedence."""
    task_config: Mapping[str, Any] = Field(default_factory=dict)
    """Options of the task, such as ``{ min_terms = 2, max_terms = 3 }``. A row with a ``task`` has its options in the
    column ``task_config``."""

    @model_validator(mode="after")
    def _can_be_made(self) -> ReasoningGymConfig:
        if self.task is not None:
            check(self.task, self.task_config)
        elif self.task_config:
            raise ValueError("task_config is set without a task. Set task, or add both to the rows as columns")
        return self


class ReasoningGym(Env):
    """The opening is the question; the first turn of the policy is scored, from 0 to 1, and ends the episode.

    The sample's seed selects the question, so all samples of a group get the same question, and evaluations get other
    questions than training. A row's column ``seed`` (a whole number from 0 to 2**31 - 1) replaces the sample's seed.
    """

    name = "reasoning_gym"
    source = "https://github.com/open-thought/reasoning-gym"
    Config = ReasoningGymConfig
    conformance = {"configs": (ReasoningGymConfig(answer="text"),), "rows": ({"prompt": "", "task": "chain_sum"},)}

    def reset(self, row: Row, seed: int) -> str:
        c = self.config
        task, task_config = row.get("task"), row.get("task_config")
        location = f"row {row.index} of source {row.source!r}"
        if task is None and c.task is None:
            raise EnvError(f"{location} has no column 'task', and [env] sets no task. Set one of the two")
        if task_config is not None and (task is None or not isinstance(task_config, Mapping)):
            value = brief(task_config) if task is not None else "a task_config without a task"
            raise EnvError(
                f"{location} has {value}; allowed in the column 'task_config': a table, beside the column 'task'"
            )
        if task is not None:
            try:
                check(task, task_config or {})
            except (ValueError, TypeError) as error:
                raise EnvError(f"{location}: {error}") from None
        if (row_seed := row.get("seed")) is not None and (type(row_seed) is not int or not 0 <= row_seed <= MOST_SEED):
            raise EnvError(f"{location} has the seed {brief(row_seed)}; allowed: a whole number from 0 to {MOST_SEED}")
        entry_seed = seed % (MOST_SEED + 1) if row_seed is None else row_seed
        self._entry = GymEntry(task or c.task, c.task_config if task is None else task_config or {}, entry_seed)
        return self._entry.question

    def step(self, action: str) -> EnvStep:
        score, info = judge(self._entry, action, self.config, EnvError)
        return EnvStep(reward=score, done=True, info={"task": self._entry.task, **info})
