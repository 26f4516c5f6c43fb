"""The order of training rows that a curriculum decides, held to what a curriculum promises."""

from __future__ import annotations

import operator
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rlhf.errors import CheckpointError, PluginError, boundary, shown
from rlhf.interfaces import Curriculum, FinishedGroup, RowSource, TrainingRows
from rlhf.interfaces.curriculum import Fate
from rlhf.saved import WAY_OUT
from rlhf.seeds import derive_seed
from rlhf.types import Group, Row

from rlhf_runtime.data.order import RowOrder, permutation
from rlhf_runtime.data.sources import Source


class UsableRows(TrainingRows):
    """Positions and rows of the training data.

    Args:
        usable: {source: indices of the rows that can be trained on, ascending}.
    """

    def __init__(self, sources: Sequence[Source], usable: Mapping[str, Sequence[int]], seed: int) -> None:
        self._seed = seed
        kept = [source for source in sources if usable[source.name]]
        self._sources = {source.name: source for source in kept}
        self._indices = {source.name: usable[source.name] for source in kept}
        made, first = [], 0
        for source in kept:
            rows = len(usable[source.name])
            made.append(RowSource(source.name, first, rows, tuple(source.columns), source.probability))
            first += rows
        self.sources = tuple(made)
        self._firsts = [source.first for source in made]

    def values(self, column: str) -> Iterator[object]:
        for name, source in self._sources.items():
            indices = self._indices[name]
            if len(indices) == len(source):  # one pass, which a columnar file reads faster
                yield from source.values(column)
            else:
                yield from (source.read(index).get(column) for index in indices)

    def where(self, position: int) -> str:
        source, index = self._at(position)
        return source.where(index)

    def shuffled(self, n: int, *counters: int) -> Sequence[int]:
        order: list[int] = permutation(n, derive_seed(self._seed, "rows/shuffled", *counters)).tolist()
        return order

    def row(self, position: int) -> Row:
        source, index = self._at(position)
        return source[index]

    def position(self, row: Row) -> int:
        """The position of a row of this data."""
        found = next(source for source in self.sources if source.name == row.source)
        return found.first + bisect_left(self._indices[row.source], row.index)

    def _at(self, position: int) -> tuple[Source, int]:
        found = self.sources[bisect_left(self._firsts, position + 1) - 1]
        return self._sources[found.name], self._indices[found.name][position - found.first]


class ChosenOrder(RowOrder):
    """Rows as a curriculum chooses them. The state of this order is how many rows were drawn, and what the data is; the
    curriculum's own state is saved with that of the run's other components."""

    def __init__(self, order: RowOrder, curriculum: Curriculum, rows: UsableRows, total_steps: int) -> None:
        super().__init__(order.sources, order.seed, order.shuffle)
        self._pools, self._drawn, self._cumulative = [self.sources], [0], None
        self.rows, self.curriculum = rows, curriculum
        self._name = f"curriculum {curriculum.name!r}"
        self._step = -1
        self._batch: set[int] = set()
        """Positions of the rows of the batch of :attr:`_step` so far."""
        with boundary(PluginError, f"setup() of {self._name}"):
            curriculum.setup(rows, order.seed, total_steps)

    @property
    def epoch(self) -> float:
        """Rows drawn so far for each row that can be drawn. A row may have come several times, another never."""
        return self.drawn / len(self.rows)

    def choose(self, n: int, step: int) -> list[Row]:
        """The next ``n`` rows of the batch of ``step``.

        Raises PluginError: the curriculum chose too few or too many rows, one that does not exist, or one twice though
        it promises not to.
        """
        with boundary(PluginError, f"choose() of {self._name}"):
            chosen = self.curriculum.choose(n, step)
        if not isinstance(chosen, Sequence) and not hasattr(chosen, "__array__"):
            raise self._refused(n, step, f"returned {shown(chosen)}, and a sequence of positions is expected")
        positions = [self._position(value, n, step) for value in chosen]
        if len(positions) != n:
            raise self._refused(n, step, f"chose {len(positions)} rows, and exactly {n} are needed")
        if step != self._step:
            self._step, self._batch = step, set()
        for position in positions:
            if position in self._batch and not self.curriculum.repeats:
                where = self.rows.where(position)
                raise self._refused(
                    n, step, f"chose row {position} ({where}) twice for one batch, though it sets repeats = False"
                )
            self._batch.add(position)
        self._drawn[0] += n
        return [self.rows.row(position) for position in positions]

    def finished_group(self, group: Group, step: int, fate: Fate) -> FinishedGroup:
        """What a curriculum is told of a group, all samples that were drawn for it included."""
        live = [t for t in group.trajectories if t.status != "failed"]
        scores = tuple(t.score for t in live if t.score is not None)
        return FinishedGroup(self.rows.position(group.row), group.number, step, scores, fate)

    def restored(self, saved: Sequence[Mapping[str, Any]] | None) -> list[FinishedGroup]:
        """The groups of one batch, from a checkpoint. Raises CheckpointError where they are not of this data."""
        if saved is None:
            raise CheckpointError(f"stream.ready of the checkpoint lacks what became of the rows of a batch. {WAY_OUT}")
        groups = [FinishedGroup(**{**group, "scores": tuple(group["scores"])}) for group in saved]
        for group in groups:
            if group.row >= len(self.rows):
                raise CheckpointError(
                    f"stream.ready of the checkpoint names row {group.row}; the data has the positions 0 to "
                    f"{len(self.rows) - 1}. {WAY_OUT}"
                )
        return groups

    def tell(self, groups: Sequence[FinishedGroup]) -> None:
        """What became of the rows of a batch, right before it is trained on."""
        with boundary(PluginError, f"finished() of {self._name}"):
            self.curriculum.finished(groups)

    def metrics(self) -> dict[str, float]:
        """Of the batch that was chosen last, named as in ``metrics.jsonl``."""
        with boundary(PluginError, f"metrics() of {self._name}"):
            return {f"curriculum/{key}": float(value) for key, value in self.curriculum.metrics().items()}

    def take(self, n: int) -> list[Row]:
        raise AssertionError("a curriculum chooses rows for a step: call choose()")

    def _position(self, value: object, n: int, step: int) -> int:
        try:
            position = operator.index(value)  # type: ignore[arg-type]  # numpy's integers, too
        except TypeError:
            raise self._refused(n, step, f"chose {shown(value)}, which is no position") from None
        if isinstance(value, bool) or not 0 <= position < len(self.rows):
            raise self._refused(
                n, step, f"chose row {shown(value)}; the data has the positions 0 to {len(self.rows) - 1}"
            )
        return position

    def _refused(self, n: int, step: int, what: str) -> PluginError:
        return PluginError(
            f"choose({n}, {step}) of {self._name} {what}. This is a fault of the plugin: `rlhf plugins check "
            f"{self.curriculum.name}` shows it; report it to its author."
        )
