"""Curricula: choose the rows that a run trains on next from the results of earlier rows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from rlhf.interfaces.component import Component

Outcome = Literal["kept", "filtered", "left_out"]


@dataclass(frozen=True, slots=True)
class RowSource:
    """A source of training data. Its rows have the positions ``first`` to ``first + rows - 1``."""

    name: str
    """Name in the run file; the prefix of per-source metrics."""
    first: int
    """Position of its first row."""
    rows: int
    """Number of its rows that can be trained on, at least 1."""
    columns: tuple[str, ...] = ()
    """Every column that some row has."""
    probability: float | None = None
    """``data.train.*.probability``: its share of the rows at the start; None if the run file sets no shares."""

    @property
    def positions(self) -> range:
        """The positions of its rows."""
        return range(self.first, self.first + self.rows)


class TrainingRows(ABC):
    """The training rows of a run, read-only. A row is identified by its position: rows are counted from 0, source after
    source, in the order of each source. Rows that ``data.too_long`` or ``data.bad_rows`` drops have no position, so
    every position can be chosen."""

    sources: tuple[RowSource, ...]

    def __len__(self) -> int:
        """Number of rows."""
        return sum(source.rows for source in self.sources)

    @abstractmethod
    def values(self, column: str) -> Iterator[object]:
        """One column of every row, by position; None if a row lacks it."""

    @abstractmethod
    def location(self, position: int) -> str:
        """Location of a row, for messages: ``train.jsonl, line 3``."""

    @abstractmethod
    def shuffled(self, n: int, *counters: int) -> Sequence[int]:
        """The numbers 0 to ``n - 1`` in an order that depends only on the run's seed, ``n`` and ``counters``."""


@dataclass(frozen=True, slots=True)
class FinishedGroup:
    """The results of one row's samples."""

    row: int
    """Its position."""
    number: int
    """Number of the group in the run. Later groups have larger numbers."""
    step: int
    """The step, counted from 0, that trains on the batch of the group."""
    scores: tuple[float, ...]
    """The score of each sample that the dynamic filter reads, in sample order: ``Trajectory.score``. Samples that
    failed or got no score are omitted. A group of given answers has no scores."""
    outcome: Outcome
    """``kept``: its samples are in the batch of ``step``. ``filtered``: ``stream.filter`` rejected it. ``left_out``:
    too many of its samples failed or got no reward."""


class Curriculum(Component):
    """Chooses the rows of every training batch. One instance lives as long as the run, on the driver. Its methods are
    called one at a time, not always on the same thread.

    The runtime calls, in this order: ``setup`` once; ``load_state_dict`` where the run resumes; then ``choose`` for the
    batches, in order, and ``finished`` between them.

    **Known results.** A batch is generated with the weights of some version v, the number of steps that they were
    trained for. With ``stream.staleness`` S, batch k has v = max(0, k - S). In rounds of R steps, v = R * (k // R).
    When ``choose`` is called for batch k, ``finished`` has been called with the groups of the batches before v and no
    others. So the rows of a batch depend on exactly the groups that its weights have learnt from. Groups of the batches
    v to k - 1 are in flight: a curriculum that must not repeat their rows has to remember that it chose them.

    In a continuous stream (``stream.mode = "continuous"``) rows are chosen when their groups are started, and
    ``finished`` is called when a step takes its batch, with the groups of the batch and those that were rejected since
    the batch before. ``step`` of ``choose`` is the step that trains on the rows if no further group is rejected. As
    long as none is, and without ``stream.oversample``, the calls are those of a batch k with v = max(0, k - S) in
    waves. The state may be restored between two calls of ``choose`` for one step.

    **Reproducible.** Every random choice is a function of the seed and of counters (``TrainingRows.shuffled``,
    ``rlhf.seeds.derive_seed``), never of a clock or of a generator with hidden state. ``state_dict`` holds everything
    else that choices depend on. It is called after every step, so it should be cheap: put long arrays into one string.
    The runtime restores it between two batches and compares ``state_dict()`` with the saved state.

    Complete example::

        class Hardest(Curriculum):
            '''The rows with the lowest mean score so far; rows without a score come first.'''

            name = "hardest"
            min_scores = 1

            def setup(self, rows, seed, total_steps):
                self.means = [-math.inf] * len(rows)

            def choose(self, n, step):
                lowest = sorted(range(len(self.means)), key=self.means.__getitem__)
                return [lowest[i % len(lowest)] for i in range(n)]

            def finished(self, groups):
                for group in groups:
                    if group.scores:
                        self.means[group.row] = sum(group.scores) / len(group.scores)

            def state_dict(self):
                return {"means": [m if math.isfinite(m) else None for m in self.means]}

            def load_state_dict(self, state):
                self.means = [-math.inf if m is None else m for m in state["means"]]
    """

    min_scores: ClassVar[int] = 0
    """Smallest number of scores that it needs per group. 0: it reads none, so it can also order the rows of offline
    algorithms. 1: it reads scores. 2: it compares the scores of a group, so ``sampling.samples_per_prompt`` is at least
    2."""
    reads_probabilities: ClassVar[bool] = False
    """Whether it uses ``RowSource.probability``. If False, a run file that sets probabilities is refused."""

    @abstractmethod
    def setup(self, rows: TrainingRows, seed: int, total_steps: int) -> None:
        """Inspect the data before any model is loaded.

        Args:
            seed: of the run, for ``derive_seed``.
            total_steps: of the run; the last batch is of step ``total_steps - 1``. A run may be resumed for more.

        Raises ConfigError (an option does not fit the data: an unknown column) or DataError (a value of a row).
        """

    @abstractmethod
    def choose(self, n: int, step: int) -> Sequence[int]:
        """The positions of the next ``n`` rows of the batch that step ``step``, counted from 0, trains on.

        Called once per batch, and again with the same ``step`` for rows that replace filtered or left-out groups. Steps
        never decrease.
        """

    def finished(self, groups: Sequence[FinishedGroup]) -> None:
        """Receive the results of one batch, in the order in which its rows were chosen, right before that batch is
        trained on. Not called in offline runs."""

    def metrics(self) -> Mapping[str, float]:
        """Numbers about the batch that was chosen last; ``{"share": 0.5}`` is ``curriculum/share`` in the metrics of
        the step that trains on it. Called once per batch, when all its rows are chosen."""
        return {}
