"""Environment: find a number hidden in a range; each question is answered with "smaller", "larger" or "found"."""

from __future__ import annotations

import re

from pydantic import model_validator
from rlhf import hookimpl
from rlhf.errors import EnvError
from rlhf.interfaces import ComponentConfig, Env
from rlhf.seeds import derive_seed
from rlhf.types import EnvStep, Row

QUESTION = re.compile(r"([0-9]{1,9})\s*\??")


class NumberGameConfig(ComponentConfig):
    """The range, and the rewards."""

    low: int = 1
    """Smallest number that can be hidden, >= 0."""
    high: int = 15
    """Largest number that can be hidden."""
    column: str = "hidden"
    """Column of the data row with the hidden number. Rows without it get a number from the sample's seed."""
    found: float = 1.0
    """Reward for naming the number."""
    cost: float = 0.1
    """Subtracted for every question, the last one included."""
    invalid_cost: float = 0.2
    """Subtracted, in addition to ``cost``, for a question that is not a number of the range."""
    show_range: bool = True
    """Start with the range, e.g. ``1-15:``. Otherwise the row's prompt must contain it."""

    @model_validator(mode="after")
    def _range(self) -> NumberGameConfig:
        if not 0 <= self.low <= self.high:
            raise ValueError(f"the range needs 0 <= low <= high, got low = {self.low}, high = {self.high}")
        return self


class NumberGame(Env):
    """A question is a number, with or without ``?``. Each answer is one character:

    ``<`` the hidden number is smaller, ``>`` it is larger, ``=`` found, which ends the episode, ``!`` not a number of
    the range. ``[env] max_turns`` ends an episode in which the number is not found.
    """

    name = "number_game"
    Config = NumberGameConfig

    async def reset(self, row: Row, seed: int) -> str:
        c = self.config
        hidden = row.get(c.column)
        if hidden is None:
            hidden = c.low + derive_seed(seed, self.name) % (c.high - c.low + 1)
        if type(hidden) is not int or not c.low <= hidden <= c.high:
            raise EnvError(
                f"row {row.index} of source {row.source!r} hides {hidden!r} (column {c.column!r}); "
                f"allowed: a whole number from {c.low} to {c.high}"
            )
        self._hidden = hidden
        return f"{c.low}-{c.high}:" if c.show_range else ""

    async def step(self, action: str) -> EnvStep:
        c = self.config
        question = QUESTION.fullmatch(action.strip())
        number = int(question[1]) if question else -1
        if not c.low <= number <= c.high:
            return EnvStep("!", -c.cost - c.invalid_cost, info={"valid": False})
        if number == self._hidden:
            return EnvStep("=", c.found - c.cost, done=True, info={"valid": True})
        return EnvStep("<" if self._hidden < number else ">", -c.cost, info={"valid": True})


@hookimpl
def rlhf_register_env() -> list[type]:
    return [NumberGame]
