"""The form of the judge's answer, and its parser: JSON of one form, and nothing else."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from rlhf.errors import brief

WINS = {"A": 1.0, "tie": 0.5, "B": 0.0}
"""{winner: share of the win for answer A}."""


class InvalidVerdict(Exception):
    """The judge's answer does not have the form. The message tells the judge what is wrong."""


class Form(ABC):
    """The form of a verdict."""

    @property
    @abstractmethod
    def schema(self) -> dict[str, Any]:
        """The JSON schema."""

    @abstractmethod
    def check(self, verdict: dict[str, Any]) -> None:
        """Raises InvalidVerdict for a verdict that has the keys of the schema but is invalid in another way."""

    def read(self, text: str) -> dict[str, Any]:
        """The verdict in the judge's answer. Raises InvalidVerdict."""
        try:
            verdict = json.loads(text, parse_constant=_refuse)
        except (ValueError, RecursionError) as error:
            raise InvalidVerdict(f"it is not JSON alone: {error}") from None
        return self.checked(verdict)

    def checked(self, verdict: Any) -> dict[str, Any]:
        """The verdict, if it has the form. Raises InvalidVerdict."""
        _keys(verdict, "the answer", list(self.schema["properties"]))
        if not isinstance(verdict["reason"], str):
            raise InvalidVerdict(f"reason is {brief(verdict['reason'])}; expected text")
        self.check(verdict)
        return dict(verdict)


class Scores(Form):
    """``{"reason": text, "scores": {criterion: whole number}}``.

    Args:
        weights: {criterion: weight}.
        scale: lowest and highest score.
    """

    def __init__(self, weights: Mapping[str, float], scale: tuple[int, int]) -> None:
        self._weights, self._scale = weights, scale

    @property
    def schema(self) -> dict[str, Any]:
        low, high = self._scale
        score = {"type": "integer", "minimum": low, "maximum": high}
        scores = _object(dict.fromkeys(self._weights, score))
        return _object({"reason": {"type": "string"}, "scores": scores})

    def check(self, verdict: dict[str, Any]) -> None:
        low, high = self._scale
        _keys(verdict["scores"], "scores", list(self._weights))
        for name, value in verdict["scores"].items():
            if type(value) is not int or not low <= value <= high:
                raise InvalidVerdict(f"scores.{name} is {brief(value)}; expected a whole number from {low} to {high}")

    def value(self, verdict: dict[str, Any]) -> float:
        """The weighted mean of the scores, from 0 to 1."""
        low, high = self._scale
        weighted = sum(weight * (verdict["scores"][name] - low) for name, weight in self._weights.items())
        return weighted / (high - low) / sum(self._weights.values())


class Winner(Form):
    """``{"reason": text, "winner": "A" | "B" | "tie"}``."""

    @property
    def schema(self) -> dict[str, Any]:
        return _object({"reason": {"type": "string"}, "winner": {"type": "string", "enum": list(WINS)}})

    def check(self, verdict: dict[str, Any]) -> None:
        winner = verdict["winner"]
        if not isinstance(winner, str) or winner not in WINS:
            raise InvalidVerdict(f"winner is {brief(winner)}; expected one of {', '.join(WINS)}")


def _object(properties: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def _keys(value: Any, label: str, names: Sequence[str]) -> None:
    if not isinstance(value, dict) or sorted(value) != sorted(names):
        raise InvalidVerdict(f"{label} is {brief(value)}; expected an object with exactly the keys {', '.join(names)}")


def _refuse(constant: str) -> float:
    raise ValueError(f"{constant} is a number that is not finite")
