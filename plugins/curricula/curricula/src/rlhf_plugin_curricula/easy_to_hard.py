"""Easy rows first: a column holds the difficulty of each row, and a schedule over the run's steps admits harder
rows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field
from rlhf.errors import ConfigError, DataError, brief, did_you_mean
from rlhf.interfaces import ComponentConfig, Curriculum, TrainingRows

from rlhf_plugin_curricula.arrays import from_text, to_text


class EasyToHard(Curriculum):
    """Chooses among the easiest rows only. Their number grows with the steps.

    At step t of a run of ``total_steps`` the share c(t) of the rows may come, the easiest first. With T = ``until`` *
    ``total_steps`` and c0 = ``start`` (arXiv:1903.09848)::

        linear  c(t) = min(1, c0 + (1 - c0) * t / T)
        root    c(t) = min(1, sqrt(c0^2 + (1 - c0^2) * t / T))

    Rows of equal difficulty are in the order of the data. The allowed rows come in a random order from the seed, and no
    row is repeated before all have come. A row that becomes allowed joins the current pass.
    """

    name = "easy_to_hard"
    source = "arXiv:1903.09848"

    class Config(ComponentConfig):
        column: str
        """Column with the difficulty of a row, a number."""
        harder: Literal["larger", "smaller"] = "larger"
        """Which numbers mean harder rows. ``smaller`` is for a pass rate measured beforehand."""
        start: Annotated[float, Field(gt=0, le=1)] = 0.2
        """c0: share of the rows, the easiest, that may be chosen at the first step."""
        until: Annotated[float, Field(gt=0, le=1)] = 0.5
        """Share of the run's steps after which every row may be chosen."""
        schedule: Literal["linear", "root"] = "linear"
        """How the share grows. ``linear``: by the same number of rows each step; ``root``: by more rows at first."""

    conformance = {"configs": (Config(column="level"),), "columns": {"level": (3, 1, 2.5, 5, 4)}}

    def setup(self, rows: TrainingRows, seed: int, total_steps: int) -> None:
        hardness = np.array(_numbers(rows, self.config.column))
        if self.config.harder == "smaller":
            hardness = -hardness
        self._rows, self._steps = rows, self.config.until * total_steps
        self._by_hardness = np.argsort(hardness, kind="stable")
        """Positions, the easiest first."""
        self._pass = 0
        self._came = np.zeros(len(rows), np.uint8)
        """For each row: 1 if it has come in the current pass."""
        self._places = self._places_of(self._pass)
        self._allowed = 0
        """Number of rows that are allowed at the latest step."""

    def choose(self, n: int, step: int) -> Sequence[int]:
        # less a bit, because a share that is a whole number of rows may be rounded up
        self._allowed = max(1, math.ceil(self.share(step) * len(self._rows) - 1e-9))
        chosen: list[int] = []
        while True:
            waiting = self._by_hardness[: self._allowed]
            waiting = waiting[self._came[waiting] == 0]
            first = waiting[np.argsort(self._places[waiting])][: n - len(chosen)]
            self._came[first] = 1
            chosen += first.tolist()
            if len(chosen) == n:
                return chosen
            self._pass += 1
            self._came[:] = 0
            self._places = self._places_of(self._pass)

    def share(self, step: int) -> float:
        """c(step), the share of the rows, the easiest first, that may be chosen at this step."""
        start, progress = self.config.start, step / self._steps
        if self.config.schedule == "root":
            return min(1.0, math.sqrt(start**2 + (1 - start**2) * progress))
        return min(1.0, start + (1 - start) * progress)

    def metrics(self) -> Mapping[str, float]:
        return {"share_allowed": self._allowed / len(self._rows)}

    def state_dict(self) -> dict[str, Any]:
        return {"pass": self._pass, "came": to_text(self._came)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._pass = state["pass"]
        self._came = from_text(state["came"], self._came)
        self._places = self._places_of(self._pass)

    def _places_of(self, number: int) -> NDArray[np.int64]:
        """For each row: its place in the order of a pass."""
        return np.argsort(np.asarray(self._rows.shuffled(len(self._rows), number), np.int64))


def _numbers(rows: TrainingRows, column: str) -> list[float]:
    """The column's value in every row. Raises ConfigError if a source lacks the column, DataError if a value is not a
    number."""
    for source in rows.sources:
        if column not in source.columns:
            raise ConfigError(
                f"curriculum.column = {column!r}: the data source {source.name!r} has no such column; it has "
                f"{', '.join(source.columns)}.{did_you_mean(column, source.columns)} Name the column that says how "
                "hard a row is."
            )
    numbers = []
    for position, value in enumerate(rows.values(column)):
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise DataError(
                f"{rows.location(position)}: the column {column!r} (curriculum.column) says how hard the row is: a "
                f"finite number is expected, got {brief(value)}. Correct the row, or name another column."
            )
        numbers.append(float(value))
    return numbers
