"""The order of training rows: a pure function of (seed, number of rows drawn), so it resumes exactly."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from rlhf.errors import CheckpointError, DataError
from rlhf.seeds import derive_seed
from rlhf.types import Row

from rlhf_runtime.data.sources import Source


class RowOrder:
    """An endless order over one or more sources.

    Without probabilities the sources are concatenated, and every pass visits each row once, in a new order. With
    probabilities each draw first picks a source, and each source has its own passes: no row of a source is drawn twice
    before all of its rows are drawn once. An epoch is as many draws as all sources have rows.
    """

    def __init__(self, sources: Sequence[Source], seed: int = 0, shuffle: bool = True) -> None:
        if not sources:
            raise DataError("data.train: no training data is named. Set --data FILE.")
        self.sources = list(sources)
        self.seed, self.shuffle = seed, shuffle
        given = [s.probability for s in sources if s.probability is not None]
        if given and (len(given) != len(sources) or abs(sum(given) - 1) > 1e-6):
            raise DataError(f"probabilities are given for all sources or for none and sum to 1, got {given}")
        self._cumulative = np.cumsum(given) if given else None
        # A pool is a set of rows with one permutation: each source alone, or all sources concatenated.
        self._pools = [[s] for s in self.sources] if given else [self.sources]
        self._drawn = [0] * len(self._pools)
        self._orders: dict[int, tuple[int, np.ndarray]] = {}

    @property
    def rows_per_epoch(self) -> int:
        return sum(len(s) for s in self.sources)

    @property
    def drawn(self) -> int:
        """Rows taken so far."""
        return sum(self._drawn)

    @property
    def epoch(self) -> float:
        """Passes over the data so far."""
        return self.drawn / self.rows_per_epoch

    def take(self, n: int) -> list[Row]:
        """The next ``n`` rows. Continues with the next pass, so no rows at the end of a pass are dropped."""
        return [self._next() for _ in range(n)]

    def state_dict(self) -> dict[str, Any]:
        """JSON values: the position in the order, and everything that the order depends on."""
        return {"drawn": list(self._drawn), **self._identity()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the position of :meth:`state_dict`.

        Raises CheckpointError naming the change: sources, their content, probabilities, seed or shuffling.
        """
        mine = self._identity()
        theirs = {name: source["fingerprint"] for name, source in state["sources"].items()}
        here = {s.name: s.fingerprint for s in self.sources}
        if list(theirs) != list(here):
            raise CheckpointError(
                f"the checkpoint was made with the training data {', '.join(theirs)}, this run has {', '.join(here)}. "
                "Give it the same data, or start a new run."
            )
        for source in self.sources:
            if theirs[source.name] != source.fingerprint:
                raise CheckpointError(
                    f"training data {source.name!r} ({source.section.path}) changed since the checkpoint was made "
                    f"({state['sources'][source.name]['rows']} rows then, {len(source)} now; fingerprint "
                    f"{theirs[source.name][:12]} then, {source.fingerprint[:12]} now): the order of rows would not be "
                    "the same. Restore the data, or start a new run."
                )
        for key in ("seed", "shuffle", "probabilities"):
            if state[key] != mine[key]:
                raise CheckpointError(
                    f"the checkpoint's order of rows was made with {key} = {state[key]}, this run has {mine[key]}"
                )
        drawn = list(state["drawn"])
        if len(drawn) != len(self._pools):
            raise CheckpointError(
                f"the checkpoint's order of rows counts the rows drawn of {len(drawn)} sources, this run draws from "
                f"{len(self._pools)}. Restore state.json from a copy, or start a new run."
            )
        self._drawn = drawn

    def _identity(self) -> dict[str, Any]:
        return {
            "seed": self.seed,
            "shuffle": self.shuffle,
            "probabilities": [s.probability for s in self.sources],
            "sources": {s.name: {"fingerprint": s.fingerprint, "rows": len(s)} for s in self.sources},
        }

    def _next(self) -> Row:
        pool = self._pick() if self._cumulative is not None else 0
        epoch, position = divmod(self._drawn[pool], self._size(pool))
        index = int(self._order(pool, epoch)[position]) if self.shuffle else position
        self._drawn[pool] += 1
        for source in self._pools[pool]:
            if index < len(source):
                return source[index]
            index -= len(source)
        raise AssertionError

    def _size(self, pool: int) -> int:
        return sum(len(s) for s in self._pools[pool])

    def _pick(self) -> int:
        assert self._cumulative is not None
        share = derive_seed(self.seed, "order/source", self.drawn) / 2**63
        return min(int(np.searchsorted(self._cumulative, share, side="right")), len(self._pools) - 1)

    def _order(self, pool: int, epoch: int) -> np.ndarray:
        if self._orders.get(pool, (-1,))[0] != epoch:
            seed = derive_seed(self.seed, "order", pool, epoch)
            self._orders[pool] = (epoch, permutation(self._size(pool), seed))
        return self._orders[pool][1]


def permutation(n: int, seed: int) -> np.ndarray:
    """int64 [n]: 0 .. n - 1 sorted by a hash of (seed, i) (SplitMix64's mixer, Steele et al. 2014).

    It uses no library's random generator, so the order does not depend on the versions of libraries.
    """
    with np.errstate(over="ignore"):
        z = (np.arange(1, n + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)) + np.uint64(seed)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z = z ^ (z >> np.uint64(31))
    return np.argsort(z, kind="stable")
