"""The conformance suite of curricula.

::

    from rlhf_testing.curriculum import CurriculumContract

    class TestMyCurriculum(CurriculumContract):
        curriculum = MyCurriculum
"""

from __future__ import annotations

import copy
import itertools
import json
import math
import operator
import random
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from rlhf.interfaces import Curriculum, FinishedGroup, RowSource, TrainingRows
from rlhf.interfaces.curriculum import Outcome
from rlhf.seeds import derive_seed

from rlhf_testing.contract import Contract, Nonconformance, expect, no_number
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
        sizes: {source: number of rows}.
        columns: {column: values that are assigned to the rows in turn}.
        shuffled: False: every order is the order of the data, so that choices can be computed by hand.
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

    def location(self, position: int) -> str:
        return f"made up, row {position}"

    def shuffled(self, n: int, *counters: int) -> Sequence[int]:
        order = list(range(n))
        if self._shuffled:
            order.sort(key=lambda i: derive_seed(self._seed, "made up", *counters, i))
        return order


class Play:
    """Simulates a run: requests rows from a curriculum and reports the results to it.

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
        self._steps_taken = 0

    def run(self, end: int) -> Play:
        """Simulate the steps before ``end``."""
        for step in range(self._steps_taken, end):
            # batches are generated ahead of the step that trains on them, but not beyond the end of the run
            while len(self.chosen) < min(step + 1 + self._staleness, STEPS):
                self._generate(len(self.chosen))
            groups = self._ready.popleft()
            if self._score is not None:
                self.curriculum.finished(groups)
            self._steps_taken += 1
        return self

    def resumed(self, fresh: Any) -> Play:
        """The same run, continued with another instance."""
        other = Play(fresh, self._staleness, self._score)
        other.chosen, other.metrics = copy.deepcopy((self.chosen, self.metrics))
        other._ready, other._number, other._steps_taken = deque(self._ready), self._number, self._steps_taken
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
        outcomes: tuple[Outcome, ...] = ("filtered", "left_out") if step % 2 else ("filtered",)
        for index, outcome in enumerate(outcomes):
            group = groups[index]
            scores = group.scores if outcome == "filtered" else ()
            groups[index] = FinishedGroup(group.row, group.number, step, scores, outcome)
        self.chosen.append(rows)
        self._ready.append(groups)
        self.metrics.append(dict(self.curriculum.metrics()))

    def _group(self, row: int, step: int, outcome: Outcome) -> FinishedGroup:
        self._number += 1
        score = self._score or (lambda row, step, sample: 0.0)
        return FinishedGroup(row, self._number - 1, step, tuple(score(row, step, s) for s in range(SAMPLES)), outcome)


def made_up_score(row: int, step: int, sample: int) -> float:
    """0 or 1. The chance to pass differs between rows, and rises with the step."""
    chance = row / 20 + step / 40
    return float(derive_seed(SEED, "made up score", row, step, sample) < chance * 2.0**63)


def position_of(value: object) -> int:
    """A position that ``choose`` returned. Raises Nonconformance if it is not an integer."""
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise Nonconformance(f"choose() gave {value!r} ({type(value).__name__}); a position is an integer") from None


class CurriculumContract(Contract):
    """Simulates runs of twelve batches of four rows over two sources of 12 and 5 rows."""

    kind = "curriculum"
    curriculum: Any = None
    columns: Mapping[str, Sequence[object]] = {}
    """{column: values that are assigned to the made-up rows in turn}, for every column that the curriculum reads."""
    sizes: Mapping[str, int] = {"one": 12, "two": 5}
    """{source: number of rows}; override it if the curriculum needs other data."""

    def build(self, config: Any) -> Any:
        """An instance after ``setup``."""
        columns = {"prompt": [f"What is {i} + 2?" for i in range(17)], **self.columns}
        curriculum = super().build(config)
        try:
            curriculum.setup(MadeUpRows(self.sizes, columns), SEED, STEPS)
        except Exception as error:
            missing = f" they lack the column {error.args[0]!r}" if isinstance(error, NoColumn) else f" {error}"
            raise Nonconformance(
                f"{self.label(config)} setup() refuses the made-up rows (columns {', '.join(columns)}; sources "
                f"{dict(self.sizes)}):{missing}. Supply what it reads: "
                'conformance = {"columns": {NAME: [values, ...]}, "sizes": {SOURCE: rows}} in the plugin\'s class'
            ) from error
        return curriculum

    def play(self, config: Any, end: int = STEPS, staleness: int = 0, score: Score | None = None) -> Play:
        """Simulates a run from its start. Error messages name the curriculum."""
        return self.go_on(config, Play(self.build(config), staleness, score or made_up_score), end)

    def go_on(self, config: Any, play: Play, end: int = STEPS) -> Play:
        try:
            return play.run(end)
        except Nonconformance as error:
            raise Nonconformance(f"{self.label(config)} {error}") from error
        except Exception as error:
            raise Nonconformance(f"{self.label(config)} raised {type(error).__name__}: {error}") from error

    # ------------------------------------------------------------------------------------- checks

    def test_rows(self) -> None:
        """``choose`` returns as many rows as requested, all from the data, whatever the results of earlier rows
        were."""
        rows = sum(self.sizes.values())
        for config in self.grid():
            for staleness in (0, 3):
                for batch in self.play(config, staleness=staleness).chosen:
                    wrong = [row for row in batch if not 0 <= row < rows]
                    expect(not wrong, f"{self.label(config)} chose {wrong}; the data has the positions 0 to {rows - 1}")

    def test_large_batch(self) -> None:
        """A batch may be larger than the data: rows are then repeated."""
        rows = sum(self.sizes.values())
        for config in self.grid():
            choice = list(self.build(config).choose(2 * rows + 1, 0))
            expect(
                len(choice) == 2 * rows + 1,
                f"{self.label(config)} choose({2 * rows + 1}, 0) of {rows} rows gave {len(choice)}. Repeat "
                "rows in a batch that is larger than the data",
            )

    def test_reproducible(self) -> None:
        """Equal seeds and equal results give equal rows, whatever the state of global random generators is."""
        for config in self.grid():
            state = random.getstate()
            try:
                random.seed(1)
                first = self.play(config, staleness=1)
                random.seed(2)
                second = self.play(config, staleness=1)
            finally:
                random.setstate(state)
            expect(
                first.chosen == second.chosen,
                f"{self.label(config)} chose different rows in a second run with the same seed: "
                f"{_difference(first.chosen, second.chosen)}. Derive random choices from the seed and from counters",
            )

    def test_resume(self) -> None:
        """The state between two batches is JSON, and a fresh instance that loads it chooses the same rows."""
        for config in self.grid():
            for staleness in (0, 2):
                plain = self.play(config, staleness=staleness)
                for step in (1, 5, 6):
                    stopped = self.play(config, step, staleness)
                    fresh = self.build(config)
                    _restore(fresh, stopped.curriculum.state_dict(), self.label(config))
                    resumed = self.go_on(config, stopped.resumed(fresh))
                    expect(
                        resumed.chosen == plain.chosen,
                        f"{self.label(config)} chose different rows after a resume at step {step} with staleness "
                        f"{staleness}: {_difference(plain.chosen, resumed.chosen)}. state_dict() must hold what the "
                        "choice depends on",
                    )
                    expect(
                        resumed.metrics == plain.metrics,
                        f"{self.label(config)} reported different metrics after a resume at step {step} than in the "
                        "uninterrupted run",
                    )

    def test_resume_inside_a_batch(self) -> None:
        """A continuous stream may save between two calls of ``choose`` for one step. A fresh instance that loads the
        state chooses the same rows of the rest."""
        for config in self.grid():
            plain = self.play(config, 5).curriculum
            plain.choose(BATCH // 2, 5)
            fresh = self.build(config)
            _restore(fresh, plain.state_dict(), self.label(config))
            rest, resumed = ([*map(position_of, curriculum.choose(BATCH // 2, 5))] for curriculum in (plain, fresh))
            expect(
                rest == resumed,
                f"{self.label(config)} chose {resumed} for the rest of a batch after a resume in its middle, but "
                f"{rest} without the resume. state_dict() must hold the state of an unfinished batch",
            )

    def test_scores(self) -> None:
        """A curriculum that declares to read no scores chooses the same rows for any scores, and also without
        results."""
        if self.cls.min_scores:
            return
        for config in self.grid():
            rows = self.play(config).chosen
            other = self.play(config, score=lambda row, step, sample: 1.0 - made_up_score(row, step, sample)).chosen
            expect(
                rows == other,
                f"{self.label(config)} chose different rows for different scores: {_difference(rows, other)}. Set "
                "min_scores = 1, so that runs without scores are refused",
            )
            self.go_on(config, Play(self.build(config)))  # an offline run

    def test_equal_scores(self) -> None:
        """The curriculum accepts scores that are all equal, absent or very large."""
        for config in self.grid():
            for value in (0.0, 1.0, -1e30):
                self.play(config, score=lambda row, step, sample, value=value: value)  # type: ignore[misc]

    def test_metrics(self) -> None:
        """Metrics are finite numbers by name."""
        for config in self.grid():
            for metrics in self.play(config).metrics:
                for name, value in metrics.items():
                    text = isinstance(name, str) and name != "" and not name.startswith("curriculum/")
                    expect(text, f"{self.label(config)} metrics() has the name {name!r}; `curriculum/` is added to it")
                    wrong = no_number(value)
                    expect(not wrong, f"{self.label(config)} metrics() has {name} = {wrong}")


def _restore(fresh: Curriculum, state: Any, label: str) -> None:
    """Load ``state``, by way of JSON."""
    try:
        text = json.dumps(state, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise Nonconformance(f"{label} state_dict() must hold JSON values only: {error}") from error
    fresh.load_state_dict(json.loads(text))
    expect(
        _has_text_keys(fresh.state_dict()) == _has_text_keys(state),
        f"{label} state_dict() has a dict with keys that are not strings. JSON makes strings of them, and "
        "load_state_dict() keeps these: convert them back there",
    )


def _has_text_keys(state: Any) -> bool:
    """Whether the keys of all dicts in a state are text."""
    if isinstance(state, Mapping):
        return all(isinstance(key, str) and _has_text_keys(value) for key, value in state.items())
    return not isinstance(state, list | tuple) or all(map(_has_text_keys, state))


def _difference(batches: Sequence[Sequence[int]], other: Sequence[Sequence[int]]) -> str:
    """Description of the first batch that differs."""
    step = next((i for i, (a, b) in enumerate(zip(batches, other, strict=False)) if a != b), math.inf)
    if not isinstance(step, int):
        return f"{len(batches)} batches and {len(other)}"
    return f"{list(batches[step])} and {list(other[step])} at step {step}"
