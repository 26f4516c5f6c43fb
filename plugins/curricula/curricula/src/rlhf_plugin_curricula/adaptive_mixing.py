"""Mixes data sources by how much is learnt from them: a bandit whose arms are the sources."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import Field
from rlhf.errors import ConfigError
from rlhf.interfaces import ComponentConfig, Curriculum, FinishedGroup, RowSource, TrainingRows
from rlhf.seeds import derive_seed


class AdaptiveMixing(Curriculum):
    """The share of each source depends on how much is learnt from it, measured by the advantages of its samples.

    Self-Evolving Curriculum (arXiv:2505.14970). The gain of a source in a batch is the mean over its groups, and over
    the samples of a group, of |score - mean| / std. It is 0 if all scores of a group are equal. For scores of 0 and 1
    it is largest if half of the samples pass. With a = ``rate`` and T = ``temperature``::

        Q(source) <- a * gain + (1 - a) * Q(source)         after each batch that had rows of the source; at first Q = 0
        share(source) is proportional to prior(source) * exp(Q(source) / T)

    The prior is ``data.train.*.probability``, or uniform. Each row's source is drawn with these shares. The rows of a
    source come in a random order from the seed, and no row is repeated before all have come. The README of the
    distribution lists the deviations from the paper.
    """

    name = "adaptive_mixing"
    source = "arXiv:2505.14970"
    min_scores = 2
    reads_probabilities = True

    class Config(ComponentConfig):
        rate: Annotated[float, Field(gt=0, le=1)] = 0.5
        """How fast the value of a source follows its gain: 1 = the gain of the latest batch."""
        temperature: Annotated[float, Field(gt=0)] = 0.4
        """How little the values influence the shares: large = the shares stay at the prior, small = nearly all rows
    come from the best source. Values are between 0 and 1."""
        min_share: Annotated[float, Field(ge=0, lt=1)] = 0.05
        """Smallest share of a source. It lets the curriculum notice when there is more to learn from a source again."""

    def setup(self, rows: TrainingRows, seed: int, total_steps: int) -> None:
        names = [source.name for source in rows.sources]
        if len(names) < 2:
            raise ConfigError(
                "curriculum adaptive_mixing mixes data sources, but data.train has only one with rows to train on: "
                f"{names[0]!r}. Add sources, or remove [curriculum]."
            )
        if self.config.min_share * len(names) >= 1:
            raise ConfigError(
                f"curriculum.min_share = {self.config.min_share:g}: {len(names)} sources with that share each leave "
                f"nothing to adapt. Set it below {1 / len(names):.3g}."
            )
        self._rows, self._seed = rows, seed
        self._prior = {source.name: source.probability or 1.0 for source in rows.sources}
        self._values = dict.fromkeys(names, 0.0)
        """{source: Q}."""
        self._row_counts = dict.fromkeys(names, 0)
        """{source: number of rows so far}."""
        self._orders: dict[str, tuple[int, Sequence[int]]] = {}
        """{source: (number of its current pass, order of its rows in that pass)}."""
        self._used = self.shares()

    def shares(self) -> dict[str, float]:
        """{source: current share of the drawn rows}. The shares sum to 1."""
        highest = max(self._values.values())
        weights = {
            name: self._prior[name] * math.exp((value - highest) / self.config.temperature)
            for name, value in self._values.items()
        }
        total, floor = math.fsum(weights.values()), self.config.min_share
        return {name: floor + (1 - floor * len(weights)) * weight / total for name, weight in weights.items()}

    def choose(self, n: int, step: int) -> Sequence[int]:
        self._used = self.shares()
        return [self._next(self._pick()) for _ in range(n)]

    def finished(self, groups: Sequence[FinishedGroup]) -> None:
        gains: defaultdict[str, list[float]] = defaultdict(list)
        for group in groups:
            if len(group.scores) >= self.min_scores:
                gains[self._source_of(group.row)].append(gain(group.scores))
        rate = self.config.rate
        for name, source_gains in gains.items():
            self._values[name] = rate * math.fsum(source_gains) / len(source_gains) + (1 - rate) * self._values[name]

    def metrics(self) -> Mapping[str, float]:
        shares = {f"share/{name}": share for name, share in self._used.items()}
        return shares | {f"value/{name}": value for name, value in self._values.items()}

    def state_dict(self) -> dict[str, Any]:
        return {"values": dict(self._values), "drawn": dict(self._row_counts)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for key in ("values", "drawn"):
            if list(state[key]) != list(self._values):
                raise ValueError(
                    f"{key} belongs to the sources {list(state[key])}, but this run has {list(self._values)}"
                )
        self._values, self._row_counts = dict(state["values"]), dict(state["drawn"])

    def _pick(self) -> RowSource:
        """The source of the next row."""
        # seeds have 63 bits
        point = derive_seed(self._seed, "rows/source", sum(self._row_counts.values())) / 2**63
        for source in self._rows.sources:
            point -= self._used[source.name]
            if point < 0:
                return source
        # the shares may sum to slightly less than the point
        return self._rows.sources[-1]

    def _next(self, source: RowSource) -> int:
        """The next row of a source."""
        number, place = divmod(self._row_counts[source.name], source.rows)
        if self._orders.get(source.name, (-1,))[0] != number:
            arm = self._rows.sources.index(source)
            self._orders[source.name] = (number, self._rows.shuffled(source.rows, arm, number))
        self._row_counts[source.name] += 1
        return source.first + self._orders[source.name][1][place]

    def _source_of(self, row: int) -> str:
        return next(source.name for source in self._rows.sources if row in source.positions)


def gain(scores: Sequence[float]) -> float:
    """The mean absolute advantage of a group: the mean of |score - mean| / std (of the population); 0 for equal
    scores."""
    if max(scores) == min(scores):
        return 0.0
    mean = math.fsum(scores) / len(scores)
    deviations = [abs(score - mean) for score in scores]
    largest = max(deviations)  # squares of very small deviations would be 0
    std = math.sqrt(math.fsum((d / largest) ** 2 for d in deviations) / len(scores))
    return math.fsum(d / largest for d in deviations) / len(scores) / std
