"""Rows that the policy solves sometimes: those whose pass rate lies in a band."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator
from rlhf.interfaces import ComponentConfig, Curriculum, FinishedGroup, TrainingRows
from rlhf.seeds import derive_seed

from rlhf_plugin_curricula.arrays import from_text, to_text

Share = Annotated[float, Field(ge=0, le=1)]


class PassRate(Curriculum):
    """Prefers rows whose pass rate so far lies in a band, and explores the others.

    Rows in the band come in turn: the row that was chosen longest ago comes first. A share ``explore`` of the draws
    goes to rows that have not come yet, in a random order from the seed. When no such row is left, it goes to rows
    outside the band, again the row that was chosen longest ago first, because a policy that learns moves rows into and
    out of the band. These rows are also used if the band has no row left. A row comes twice in a batch only if the
    batch already has all rows.
    """

    name = "pass_rate"
    min_scores = 1

    class Config(ComponentConfig):
        low: Share = 0.0
        """A row is in the band only if low < its pass rate; strict."""
        high: Share = 1.0
        """A row is in the band only if its pass rate < high; strict."""
        pass_threshold: float = 1.0
        """A sample passes if its score is at least this."""
        explore: Share = 0.25
        """Share of the draws from rows outside the band, rows not yet chosen first."""
        memory: Share = 0.5
        """Weight of a row's earlier samples when the row is sampled again: 1 = the same as the new ones, 0 = none, so
    that the pass rate is that of the latest group."""

        @model_validator(mode="after")
        def _has_room(self) -> PassRate.Config:
            if self.low >= self.high:
                raise ValueError(f"the band is empty: low = {self.low:g} must be below high = {self.high:g}")
            return self

    def setup(self, rows: TrainingRows, seed: int, total_steps: int) -> None:
        self._seed = seed
        self._order = np.asarray(rows.shuffled(len(rows)), np.int64)
        """Positions in the order in which rows are explored."""
        self._scored = np.zeros(len(rows))
        """By row: samples with a score, weighed by :attr:`Config.memory`."""
        self._passed = np.zeros(len(rows))
        """For each row: number of those samples that passed."""
        self._last = np.full(len(rows), -1, np.int64)
        """By row: number of the draw that chose it last; -1 before it has come."""
        self._draws = 0
        self._step = -1
        self._first = 0
        """First draw of the batch of :attr:`_step`. Rows drawn since then are in the batch."""
        self._origins = {"band": 0, "unseen": 0, "outside": 0}
        """{reason of the choice: number of rows of that batch}."""

    def choose(self, n: int, step: int) -> Sequence[int]:
        if step != self._step:
            self._step, self._first = step, self._draws
            self._origins = dict.fromkeys(self._origins, 0)
        chosen: list[int] = []
        while True:
            chosen += self._draw(n - len(chosen))
            if len(chosen) == n:
                return chosen
            self._first = self._draws  # the batch has every row, so rows are repeated

    def finished(self, groups: Sequence[FinishedGroup]) -> None:
        keep = self.config.memory
        for group in groups:
            if group.scores:
                passed = sum(score >= self.config.pass_threshold for score in group.scores)
                self._scored[group.row] = keep * self._scored[group.row] + len(group.scores)
                self._passed[group.row] = keep * self._passed[group.row] + passed

    def metrics(self) -> Mapping[str, float]:
        rows = sum(self._origins.values())
        return {
            "from_band": self._origins["band"] / rows,
            "from_unseen": self._origins["unseen"] / rows,
            "rows_in_band": float(self._in_band().sum()),
        }

    def state_dict(self) -> dict[str, Any]:
        return {
            "draws": self._draws,
            "step": self._step,
            "first": self._first,
            "origins": dict(self._origins),
            "last": to_text(self._last),
            "scored": to_text(self._scored),
            "passed": to_text(self._passed),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._draws = state["draws"]
        # A continuous stream may be saved in the middle of a batch.
        self._step, self._first, self._origins = state["step"], state["first"], dict(state["origins"])
        self._last = from_text(state["last"], self._last)
        self._scored = from_text(state["scored"], self._scored)
        self._passed = from_text(state["passed"], self._passed)

    def _draw(self, n: int) -> list[int]:
        """``n`` rows that are not in the batch yet, or fewer if fewer are left."""
        free, band, old = self._last < self._first, self._in_band(), self._last >= 0
        queues = {
            "band": self._oldest(free & band, n),
            "unseen": iter(self._order[~old[self._order]][:n]),
            "outside": self._oldest(free & old & ~band, n),
        }
        chosen = []
        for _ in range(n):
            # seeds have 63 bits
            explores = derive_seed(self._seed, "rows/explore", self._draws) < self.config.explore * 2.0**63
            for origin in ("unseen", "outside", "band") if explores else ("band", "unseen", "outside"):
                if (row := next(queues[origin], None)) is not None:
                    break
            else:
                break
            self._last[row] = self._draws
            self._draws += 1
            self._origins[origin] += 1
            chosen.append(int(row))
        return chosen

    def _in_band(self) -> NDArray[np.bool_]:
        """By row: whether its pass rate is known and lies in the band."""
        has_rate = self._scored > 0
        rates = np.divide(self._passed, self._scored, out=np.zeros_like(self._passed), where=has_rate)
        band_mask: NDArray[np.bool_] = has_rate & (rates > self.config.low) & (rates < self.config.high)
        return band_mask

    def _oldest(self, selection: NDArray[np.bool_], n: int) -> Iterator[np.int64]:
        """The ``n`` rows under the mask ``selection`` that were chosen longest ago, in that order."""
        rows = np.flatnonzero(selection)
        return iter(rows[np.argsort(self._last[rows], kind="stable")][:n])
