"""Reads the answer in a turn of the policy, and scores it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field
from rlhf.errors import RlhfError, shown
from rlhf.interfaces import ComponentConfig

from rlhf_plugin_reasoning_gym.task import GymEntry


class AnswerConfig(ComponentConfig):
    """How an answer is read."""

    answer: Literal["tag", "text"] = "tag"
    """``tag``: the answer is the text in the last ``<answer>...</answer>``, and a turn without it gets 0. ``text``: the
    answer is the whole turn without white space around it."""
    scorer_error: Annotated[float, Field(ge=0, le=1)] | None = None
    """Score of an answer on which the task's scorer raises an error. Absent: the sample has failed. A few scorers raise
    for every answer of another form."""


def judge(entry: GymEntry, turn: str, config: AnswerConfig, failure: type[RlhfError]) -> tuple[float, dict[str, Any]]:
    """(score from 0 to 1, whether there was an answer and the scorer's error).

    Raises ``failure`` if the scorer raises and ``scorer_error`` is not set.
    """
    from reasoning_gym.utils import extract_answer

    answer = extract_answer(turn) if config.answer == "tag" else turn.strip()
    if answer is None:
        return 0.0, {"answered": False}
    try:
        return entry.score(answer), {"answered": True}
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
        if config.scorer_error is None:
            raise failure(
                f"the scorer of task {entry.task!r} raised {why} for the answer {shown(answer)}. Set scorer_error if "
                "such answers have a score"
            ) from error
        return config.scorer_error, {"answered": True, "scorer_error": why}
