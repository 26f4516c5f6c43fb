"""The order of training rows. It is a pure function of (seed, number of rows drawn), so it resumes exactly. With a
curriculum, the curriculum chooses the rows, and its choices are checked against its promises."""

from __future__ import annotations

import operator
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from rlhf.errors import CheckpointError, DataError, PluginError, boundary, brief
from rlhf.interfaces import Curriculum, FinishedGroup, RowSource, TrainingRows
from rlhf.interfaces.curriculum import Outcome
from rlhf.saved import WAY_OUT
from rlhf.seeds import derive_seed
from rlhf.types import Group, Row

from rlhf_runtime.data.sources import Source


class RowOrder:
    """An endless order over one or more sources.

    Without probabilities the sources are concatenated, and every pass visits each row once, in a new order. With
    probabilities each draw first picks a source, and each source has its own passes: no row of a source is drawn twice
    before all of its rows are drawn once. An epoch has as many draws as all sources together have rows.
    """

    def __init__(self, sources: Sequence[Source], seed: int = 0, shuffle: bool = True) -> None:
        if not sources:
            raise DataError("data.train: no training data is named. Set --data FILE.")
        self.sources = list(sources)
        self.seed, self.shuffle = seed, shuffle
        probabilities = [s.probability for s in sources if s.probability is not None]
        if probabilities and (len(probabilities) != len(sources) or abs(sum(probabilities) - 1) > 1e-6):
            raise DataError(f"probabilities must be set for all sources or for none, and sum to 1, got {probabilities}")
        self._cumulative = np.cumsum(probabilities) if probabilities else None
        # A pool is a set of rows with one permutation: each source alone, or all sources concatenated.
        self._pools = [[s] for s in self.sources] if probabilities else [self.sources]
        self._positions = [0] * len(self._pools)
        self._orders: dict[int, tuple[int, np.ndarray]] = {}

    @property
    def rows_per_epoch(self) -> int:
        return sum(len(s) for s in self.sources)

    @property
    def rows_taken(self) -> int:
        """Rows taken so far."""
        return sum(self._positions)

    @property
    def epoch(self) -> float:
        """Passes over the data so far."""
        return self.rows_taken / self.rows_per_epoch

    def take(self, n: int) -> list[Row]:
        """The next ``n`` rows. Continues with the next pass, so no rows at the end of a pass are dropped."""
        return [self._next(self._draw_pool()) for _ in range(n)]

    def take_instead(self, row: Row) -> Row:
        """The next row in place of ``row``, which cannot be used. With probabilities it is of the same source, so that
        each source has its share of the rows that are used."""
        return self._next(self._pool_of(row))

    def rows_of_pass(self, row: Row) -> int:
        """Number of rows in the passes of ``row``: with probabilities those of its source, else all."""
        return self._size(self._pool_of(row))

    def state_dict(self) -> dict[str, Any]:
        """JSON values: the position in the order, and everything that determines the order."""
        return {"drawn": list(self._positions), **self._identity()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the position of :meth:`state_dict`.

        Raises CheckpointError naming the change: sources, their content, probabilities, seed or shuffling.
        """
        identity = self._identity()
        saved = {name: source["fingerprint"] for name, source in state["sources"].items()}
        sources = {s.name: s.fingerprint for s in self.sources}
        if list(saved) != list(sources):
            raise CheckpointError(
                f"the checkpoint was made with the training data {', '.join(saved)}, but this run has "
                f"{', '.join(sources)}. Use the same data, or start a new run."
            )
        for source in self.sources:
            if saved[source.name] != source.fingerprint:
                raise CheckpointError(
                    f"training data {source.name!r} ({source.section.path}) changed since the checkpoint was made "
                    f"({state['sources'][source.name]['rows']} rows then, {len(source)} now; fingerprint "
                    f"{saved[source.name][:12]} then, {source.fingerprint[:12]} now): the order of rows would not be "
                    "the same. Restore the data, or start a new run."
                )
        for key in ("seed", "shuffle", "probabilities"):
            if state[key] != identity[key]:
                raise CheckpointError(
                    f"the checkpoint's order of rows was made with {key} = {state[key]}, but this run has "
                    f"{identity[key]}"
                )
        counts = list(state["drawn"])
        if len(counts) != len(self._pools):
            raise CheckpointError(
                f"the checkpoint's order of rows counts the rows drawn from {len(counts)} sources, but this run draws "
                f"from {len(self._pools)}. Restore state.json from a copy, or start a new run."
            )
        self._positions = counts

    def _identity(self) -> dict[str, Any]:
        return {
            "seed": self.seed,
            "shuffle": self.shuffle,
            "probabilities": [s.probability for s in self.sources],
            "sources": {s.name: {"fingerprint": s.fingerprint, "rows": len(s)} for s in self.sources},
        }

    def _draw_pool(self) -> int:
        if self._cumulative is None:
            return 0
        share = derive_seed(self.seed, "order/source", self.rows_taken) / 2**63
        # The probabilities may sum to slightly less than 1, so a share can be above the last sum.
        return min(int(np.searchsorted(self._cumulative, share, side="right")), len(self._pools) - 1)

    def _pool_of(self, row: Row) -> int:
        return 0 if self._cumulative is None else [source.name for source in self.sources].index(row.source)

    def _size(self, pool: int) -> int:
        return sum(len(source) for source in self._pools[pool])

    def _next(self, pool: int) -> Row:
        size = self._size(pool)
        epoch, index = divmod(self._positions[pool], size)
        if self.shuffle:
            if self._orders.get(pool, (-1,))[0] != epoch:
                self._orders[pool] = epoch, permutation(size, derive_seed(self.seed, "order", pool, epoch))
            index = int(self._orders[pool][1][index])
        self._positions[pool] += 1
        for source in self._pools[pool]:
            if index < len(source):
                return source[index]
            index -= len(source)
        raise AssertionError


def permutation(n: int, seed: int) -> np.ndarray:
    """int64 [n]: 0 .. n - 1 sorted by a hash of (seed, i) (SplitMix64's mixer, Steele et al. 2014).

    It uses no random generator of a library, so the order does not depend on versions of libraries.
    """
    with np.errstate(over="ignore"):
        z = (np.arange(1, n + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)) + np.uint64(seed)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z = z ^ (z >> np.uint64(31))
    return np.argsort(z, kind="stable")


class UsableRows(TrainingRows):
    """Positions and rows of the training data.

    Args:
        usable: {source: indices of the rows that can be trained on, ascending}.
    """

    def __init__(self, sources: Sequence[Source], usable: Mapping[str, Sequence[int]], seed: int) -> None:
        self._seed = seed
        usable_sources = [source for source in sources if usable[source.name]]
        self._sources = {source.name: source for source in usable_sources}
        self._indices = {source.name: usable[source.name] for source in usable_sources}
        row_sources, first = [], 0
        for source in usable_sources:
            rows = len(usable[source.name])
            row_sources.append(RowSource(source.name, first, rows, tuple(source.columns), source.probability))
            first += rows
        self.sources = tuple(row_sources)
        self._firsts = [source.first for source in row_sources]

    def values(self, column: str) -> Iterator[object]:
        for name, source in self._sources.items():
            indices = self._indices[name]
            if len(indices) == len(source):  # one pass, which a columnar file reads faster
                yield from source.values(column)
            else:
                yield from (source.read(index).get(column) for index in indices)

    def location(self, position: int) -> str:
        source, index = self._source_and_index(position)
        return source.location(index)

    def shuffled(self, n: int, *counters: int) -> Sequence[int]:
        order: list[int] = permutation(n, derive_seed(self._seed, "rows/shuffled", *counters)).tolist()
        return order

    def row(self, position: int) -> Row:
        source, index = self._source_and_index(position)
        return source[index]

    def position(self, row: Row) -> int:
        """The position of a row of this data."""
        row_source = next(source for source in self.sources if source.name == row.source)
        return row_source.first + bisect_left(self._indices[row.source], row.index)

    def _source_and_index(self, position: int) -> tuple[Source, int]:
        row_source = self.sources[bisect_left(self._firsts, position + 1) - 1]
        return self._sources[row_source.name], self._indices[row_source.name][position - row_source.first]


class CurriculumOrder(RowOrder):
    """Rows that a curriculum chooses. The state of this order is the number of drawn rows and the identity of the data.
    The state of the curriculum is saved with the run's other components."""

    def __init__(self, order: RowOrder, curriculum: Curriculum, rows: UsableRows, total_steps: int) -> None:
        super().__init__(order.sources, order.seed, order.shuffle)
        self._pools, self._positions, self._cumulative = [self.sources], [0], None
        self.rows, self.plugin = rows, curriculum
        self._name = f"curriculum {curriculum.name!r}"
        with boundary(PluginError, f"setup() of {self._name}"):
            curriculum.setup(rows, order.seed, total_steps)

    @property
    def epoch(self) -> float:
        """Rows drawn so far, divided by the rows that can be drawn. A row may have been drawn several times, another
        never."""
        return self.rows_taken / len(self.rows)

    def choose(self, n: int, step: int) -> list[Row]:
        """The next ``n`` rows of the batch of ``step``.

        Raises PluginError: the curriculum chose too few or too many rows, or one that does not exist.
        """
        with boundary(PluginError, f"choose() of {self._name}"):
            chosen = self.plugin.choose(n, step)
        if not isinstance(chosen, Sequence) and not hasattr(chosen, "__array__"):
            raise self._refused(n, step, f"returned {brief(chosen)} instead of a sequence of positions")
        positions = [self._position(value, n, step) for value in chosen]
        if len(positions) != n:
            raise self._refused(n, step, f"chose {len(positions)} rows instead of exactly {n}")
        self._positions[0] += n
        return [self.rows.row(position) for position in positions]

    def finished_group(self, group: Group, step: int, outcome: Outcome) -> FinishedGroup:
        """The results of a group for a curriculum. They include all samples that were drawn for the group."""
        live = [t for t in group.trajectories if t.status != "failed"]
        scores = tuple(t.score for t in live if t.score is not None)
        return FinishedGroup(self.rows.position(group.row), group.number, step, scores, outcome)

    def restored(self, saved: Sequence[Mapping[str, Any]] | None) -> list[FinishedGroup]:
        """The groups of one batch, from a checkpoint. Raises CheckpointError if they are not of this data."""
        if saved is None:
            raise CheckpointError(f"stream.ready of the checkpoint lacks the results of the rows of a batch. {WAY_OUT}")
        groups = [FinishedGroup(**{**group, "scores": tuple(group["scores"])}) for group in saved]
        for group in groups:
            if group.row >= len(self.rows):
                raise CheckpointError(
                    f"stream.ready of the checkpoint names row {group.row}; the data has the positions 0 to "
                    f"{len(self.rows) - 1}. {WAY_OUT}"
                )
        return groups

    def tell(self, groups: Sequence[FinishedGroup]) -> None:
        """Pass the results of the rows of a batch to the curriculum, right before the batch is trained on."""
        with boundary(PluginError, f"finished() of {self._name}"):
            self.plugin.finished(groups)

    def metrics(self) -> dict[str, float]:
        """The curriculum's metrics of the last chosen batch, named as in ``metrics.jsonl``."""
        with boundary(PluginError, f"metrics() of {self._name}"):
            return {f"curriculum/{key}": float(value) for key, value in self.plugin.metrics().items()}

    def take(self, n: int) -> list[Row]:
        raise AssertionError("a curriculum chooses rows for a step: call choose()")

    def _position(self, value: object, n: int, step: int) -> int:
        try:
            position = operator.index(value)  # type: ignore[arg-type]  # numpy's integers, too
        except TypeError:
            raise self._refused(n, step, f"chose {brief(value)}, which is not a position") from None
        if isinstance(value, bool) or not 0 <= position < len(self.rows):
            raise self._refused(
                n, step, f"chose row {brief(value)}; the data has the positions 0 to {len(self.rows) - 1}"
            )
        return position

    def _refused(self, n: int, step: int, problem: str) -> PluginError:
        return PluginError(
            f"choose({n}, {step}) of {self._name} {problem}. This is a bug in the plugin: `rlhf plugins check "
            f"{self.plugin.name}` shows it; report it to the plugin's author."
        )
