"""The reward: finds the final answer in a text and compares it with the true answer in the row."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Literal

from pydantic import Field
from rlhf.errors import RewardError
from rlhf.interfaces import ComponentConfig, Reward
from rlhf.types import Group, RewardResult, Row

from rlhf_plugin_math.equivalence import equivalent
from rlhf_plugin_math.extraction import extract_answer

Place = Literal["boxed", "hash", "tag", "answer_is", "last_number"]


class MathConfig(ComponentConfig):
    """The column of the true answer, the places that are searched, and the value of each outcome."""

    column: str = "answer"
    """Row column with the true answer: text or a number, or a worked solution that ends in ``#### 72``, ``A: 72``,
    ``<answer>72</answer>`` or ``\\boxed{72}``. A list, also as JSON, holds several, of which each is right. None in a
    row: the reward does not apply to it."""
    extract: tuple[Place, ...] = Field(("boxed", "hash", "tag", "answer_is", "last_number"), min_length=1)
    """Places to search for the answer, in order: the last ``\\boxed{}``, after the last ``####``, the last
    ``<answer>...</answer>``, after "the answer is", "answer:" or a line's "A:", the last number. List fewer to require
    a form."""
    correct: float = 1.0
    """Reward of an answer that equals the true answer."""
    wrong: float = 0.0
    """Reward of another answer."""
    no_answer: float = 0.0
    """Reward if no answer was found in these places."""
    tolerance: float = Field(0.0, ge=0.0)
    """Largest relative difference of equal numbers; 0: numbers must be exactly equal."""
    max_chars: int = Field(300, ge=1)
    """Answers longer than this are compared as text only."""
    max_bits: int = Field(10_000, ge=64)
    """Largest power of numbers, in bits, that is computed; answers with a larger one are compared as text only."""


class MathReward(Reward):
    """``score`` is plain ``def``, so it runs in a worker process. An answer that takes too long to compare is killed at
    the deadline."""

    name = "math"
    source = "Answer forms: Hendrycks et al. 2021, arXiv:2103.03874 (boxed); Cobbe et al. 2021, arXiv:2110.14168 (####)"
    Config = MathConfig
    reads = "text"

    def columns(self) -> tuple[str, ...]:
        return (self.config.column,)

    def score(self, group: Group) -> list[RewardResult]:
        truths = self._truths(group.row)
        if truths is None:
            return [RewardResult(None) for _ in group.trajectories]
        return [self._grade(t.answer, truths) for t in group.trajectories]

    def _grade(self, text: str, truths: list[str]) -> RewardResult:
        c = self.config
        answer = extract_answer(text, c.extract)
        if answer is None:
            return RewardResult(c.no_answer, info={"extracted": None})
        equal = any(equivalent(answer, truth, c.tolerance, c.max_chars, c.max_bits) for truth in truths)
        return RewardResult(c.correct if equal else c.wrong, info={"extracted": answer[:100]})

    def _truths(self, row: Row) -> list[str] | None:
        column = self.config.column
        if column not in row.columns:
            raise RewardError(f"the row has no column {column!r}; it has {sorted(row.columns)}. Set `column`.")
        value = row[column]
        if value is None:
            return None
        if isinstance(value, str) and value.startswith(('["', '{"')):
            with suppress(ValueError, RecursionError):
                value = json.loads(value)
        values = value if isinstance(value, list) and value else [value]
        if any(isinstance(v, bool) or not isinstance(v, str | int | float) for v in values):
            raise RewardError(
                f"column {column!r} holds {type(value).__name__} {value!r}; allowed: text or a number, or a list of "
                "them. A value inside an object has a dotted name: NAME.ground_truth"
            )
        marked = [(str(v), extract_answer(str(v), ("boxed", "hash", "tag", "answer_is"))) for v in values]
        return [text if answer is None else answer for text, answer in marked]
