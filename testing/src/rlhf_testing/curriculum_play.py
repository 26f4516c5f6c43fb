"""A simulated run for curricula: made-up rows, and the results of the groups that were made of chosen rows."""

from __future__ import annotations

import copy
import itertools
import operator
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from rlhf.interfaces import FinishedGroup, RowSource, TrainingRows
from rlhf.interfaces.curriculum import Fate
from rlhf.seeds import derive_seed

from rlhf_testing.contract import Nonconformance, expect
from rlhf_testing.fabricate import NoColumn

STEPS = 12
"""Number of steps of the simulated run."""
BATCH = 4
SAMPLES = 4
SEED = 3

Score = Callable[[int, int, int], float]
"""``score(row, step, sample)`` of a made-up sample."""


class MadeUpRows(TrainingRows):
    """Training data of any size.

    Args:
        sizes: {source: how many rows it has}.
        columns: {column: the values that the rows have, in turn}.
        shuffled: False: every order is that of the data, so that choices can be computed by hand.
    """

    def __init__(
        self,
        sizes: Mapping[str, int],
        columns: Mapping[str, Sequence[object]] | None = None,
        seed: int = SEED,
        shuffled: bool = True,
        probabilities: Sequence[float | None] = (),
    ) -> None:
        self._columns, self._seed, self._shuffled = dict(columns or {}), seed, shuffled
        shares = [*probabilities, *[None] * len(sizes)]
        firsts = itertools.accumulate(sizes.values(), initial=0)
        parts = zip(sizes.items(), firsts, shares, strict=False)
        self.sources = tuple(RowSource(name, first, n, tuple(self._columns), p) for (name, n), first, p in parts)

    def values(self, column: str) -> Iterator[object]:
        if column not in self._columns:
            raise NoColumn(column, list(self._columns))
        return itertools.islice(itertools.cycle(self._columns[column]), len(self))

    def where(self, position: int) -> str:
        return f"made up, row {position}"

    def shuffled(self, n: int, *counters: int) -> Sequence[int]:
        order = list(range(n))
        if self._shuffled:
            order.sort(key=lambda i: derive_seed(self._seed, "made up", *counters, i))
        return order


class Play:
    """Simulates a run: asks a curriculum for rows and reports the results to it.

    Args:
        curriculum: an instance after ``setup``.
        staleness: number of batches that are generated ahead.
        score: gives the score of each sample; None: no results are reported, as in an offline run.
    """

    def __init__(self, curriculum: Any, staleness: int = 0, score: Score | None = None) -> None:
        self.curriculum, self._staleness, self._score = curriculum, staleness, score
        self.chosen: list[list[int]] = []
        """The rows of each batch so far."""
        self.metrics: list[dict[str, float]] = []
        """The metrics that the curriculum reported after each batch."""
        self._ready: deque[list[FinishedGroup]] = deque()
        self._number = 0
        self._taken = 0

    def run(self, until: int) -> Play:
        """Simulate the steps before ``until``."""
        for step in range(self._taken, until):
            while len(self.chosen) < min(step + 1 + self._staleness, STEPS):
                self._generate(len(self.chosen))
            groups = self._ready.popleft()
            if self._score is not None:
                self.curriculum.finished(groups)
            self._taken += 1
        return self

    def resumed(self, fresh: Any) -> Play:
        """The same run, continued with another instance."""
        other = Play(fresh, self._staleness, self._score)
        other.chosen, other.metrics = copy.deepcopy((self.chosen, self.metrics))
        other._ready, other._number, other._taken = deque(self._ready), self._number, self._taken
        return other

    def _generate(self, step: int) -> None:
        rows: list[int] = []
        groups: list[FinishedGroup] = []
        for missing in (BATCH, 1) if self._score is not None else (BATCH,):  # one group is filtered and replaced
            choice = self.curriculum.choose(missing, step)
            positions = [position_of(row) for row in choice]
            expect(
                len(positions) == missing,
                f"choose({missing}, {step}) gave {len(positions)} rows; exactly {missing} are needed",
            )
            groups += [self._group(row, step, "kept") for row in positions]
            rows += positions
        fates: tuple[Fate, ...] = ("filtered", "left_out") if step % 2 else ("filtered",)
        for index, fate in enumerate(fates):
            group = groups[index]
            scores = group.scores if fate == "filtered" else ()
            groups[index] = FinishedGroup(group.row, group.number, step, scores, fate)
        self.chosen.append(rows)
        self._ready.append(groups)
        self.metrics.append(dict(self.curriculum.metrics()))

    def _group(self, row: int, step: int, fate: Fate) -> FinishedGroup:
        self._number += 1
        score = self._score or (lambda row, step, sample: 0.0)
        return FinishedGroup(row, self._number - 1, step, tuple(score(row, step, s) for s in range(SAMPLES)), fate)


def made_up_score(row: int, step: int, sample: int) -> float:
    """0 or 1. The chance to pass differs between rows, and rises with the step."""
    chance = row / 20 + step / 40
    return float(derive_seed(SEED, "made up score", row, step, sample) < chance * 2.0**63)


def position_of(value: object) -> int:
    """A position that ``choose`` gave. Raises Nonconformance where it is no integer."""
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise Nonconformance(f"choose() gave {value!r} ({type(value).__name__}); a position is an integer") from None
