"""A task of reasoning-gym with its config: drawing an entry from a seed, reading an answer, and scoring it.

The package is imported when the first entry is drawn, because its import takes seconds, and every command lists the
plugin.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from functools import cache
from typing import Annotated, Any, Literal

from pydantic import Field
from rlhf.errors import EnvError, RlhfError, brief, did_you_mean
from rlhf.interfaces import ComponentConfig

COMPOSITE = "composite"
SET_HERE = {"seed", "size"}
"""Fields of a task's config that are set for every entry."""
MOST_SEED = 2**31 - 1
"""Largest seed of an entry. Some tasks use NumPy's 32-bit seeds, and some add small numbers to their seed."""


class GymEntry:
    """One question. ``GymEntry(task, config, seed)`` gives the same question in every process.

    Raises whatever the task raises for a config that it cannot use; see :func:`check`.
    """

    def __init__(self, task: str, config: Mapping[str, Any], seed: int) -> None:
        import reasoning_gym
        from reasoning_gym.composite import DatasetSpec

        options = dict(config)
        if task == COMPOSITE:
            options["datasets"] = [DatasetSpec(**{"weight": 1.0, "config": {}, **part}) for part in _parts(config)]
        self._dataset = reasoning_gym.create_dataset(task, **options, seed=seed, size=1)
        self._entry: dict[str, Any] = self._dataset[0]
        self.question: str = self._entry["question"]
        self.answer: str | None = self._entry["answer"]
        """One right answer; None for a task that has only a scorer."""
        self.task: str = self._entry["metadata"]["source_dataset"]
        """The task of the question; for ``composite`` the part that it comes from."""

    def score(self, answer: str) -> float:
        """Score from 0 to 1 by the task's own scorer. Raises the scorer's exceptions, and EnvError for a value outside
        the range."""
        value = float(self._dataset.score_answer(answer, self._entry))
        if not -1e-6 <= value <= 1 + 1e-6:  # sums of shares are rounded
            raise EnvError(f"task {self.task!r} scored an answer with {value}; allowed: 0 to 1")
        return min(max(value, 0.0), 1.0)


def check(task: str, config: Mapping[str, Any]) -> None:
    """Raises ValueError if the task does not exist, or creates no entry with this config."""
    try:
        text = json.dumps(config, sort_keys=True)
    except TypeError as error:
        raise ValueError(f"the config of task {task!r} must hold numbers, text, lists and tables: {error}") from None
    _check(task, text)


@cache
def _check(task: str, text: str) -> None:
    from reasoning_gym.factory import DATASETS

    config = json.loads(text)
    if task not in DATASETS:
        suggestion = (
            did_you_mean(task, DATASETS) or f" It has {len(DATASETS)}, among them chain_sum, countdown and sudoku."
        )
        raise ValueError(f"reasoning-gym has no task {task!r}.{suggestion}")
    allowed = {field.name for field in fields(DATASETS[task][1])} - SET_HERE
    for name in config:
        if name in SET_HERE:
            raise ValueError(
                f"{name!r} is set for every entry; remove it. The column 'seed' of a row chooses the entry"
            )
        if name not in allowed:
            suggestion = did_you_mean(name, allowed)
            raise ValueError(f"task {task!r} has no option {name!r}.{suggestion} It has {', '.join(sorted(allowed))}")
    if task == COMPOSITE:
        for part in _parts(config):
            if not isinstance(part, dict) or "name" not in part or part.keys() - {"name", "weight", "config"}:
                raise ValueError(
                    f"'datasets' holds {brief(part)}; allowed: tables with name, weight and config, such as "
                    '{ name = "chain_sum", weight = 2, config = { max_terms = 3 } }'
                )
            check(part["name"], part.get("config", {}))
    try:
        GymEntry(task, config, 0)
    except Exception as error:
        raise ValueError(f"task {task!r} makes no entry with {config}: {type(error).__name__}: {error}") from error


def _parts(config: Mapping[str, Any]) -> list[Any]:
    parts = config.get("datasets")
    if not isinstance(parts, list | tuple) or not parts:
        raise ValueError(f"task {COMPOSITE!r} needs 'datasets', a list of tables with name, weight and config")
    return list(parts)


class AnswerConfig(ComponentConfig):
    """How an answer is read."""

    answer: Literal["tag", "text"] = "tag"
    """``tag``: the answer is the text in the last ``<answer>...</answer>``, and a turn without it gets 0. ``text``: the
    answer is the whole turn without white space around it."""
    scorer_error: Annotated[float, Field(ge=0, le=1)] | None = None
    """Score of an answer on which the task's scorer raises an error. Absent: the sample has failed. A few scorers raise
    for every answer of another form."""


def judge(entry: GymEntry, turn: str, config: AnswerConfig, failure: type[RlhfError]) -> tuple[float, dict[str, Any]]:
    """(score from 0 to 1, {whether an answer was found, the scorer's error}).

    Raises ``failure`` if the scorer raises and ``scorer_error`` is not set.
    """
    from reasoning_gym.utils import extract_answer

    answer = extract_answer(turn) if config.answer == "tag" else turn.strip()
    if answer is None:
        return 0.0, {"answered": False}
    try:
        return entry.score(answer), {"answered": True}
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        if config.scorer_error is None:
            raise failure(
                f"the scorer of task {entry.task!r} raised {reason} for the answer {brief(answer)}. Set scorer_error "
                "if such answers have a score"
            ) from error
        return config.scorer_error, {"answered": True, "scorer_error": reason}
