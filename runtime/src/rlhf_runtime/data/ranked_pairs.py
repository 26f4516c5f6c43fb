"""``data.pairs = "all"``: every pair of ranked answers becomes a separate row."""

from __future__ import annotations

from typing import Any

from rlhf.errors import DataError

from rlhf_runtime.data.comparisons import OF_MARGIN, SHAPES, unequal_pairs
from rlhf_runtime.data.sources import Source

_SCORED = frozenset(shape.meaning + end for shape in SHAPES if not shape.preference for end in ("", OF_MARGIN))
"""Conversions of lists of answers with a score for each answer."""


class RankedPairs(Source):
    """The rows of another source, repeated for every pair of answers with different scores. Each repetition has only
    these two answers. A row without such a pair, or with scores that cannot be read, is not changed, and is a bad
    row."""

    def __init__(self, source: Source) -> None:
        super().__init__(source.section, source.columns, f"{source.fingerprint} {type(self).__name__}")
        assert source.layout is not None  # of ranked answers
        self.layout = source.layout
        self._source = source
        self._column = source.layout.columns.get("answers") or source.layout.columns["margin"]
        meaning = source.layout.conversion.removesuffix(OF_MARGIN)
        self._pairs: list[tuple[int, tuple[int, ...]]] = [
            (row, pair)
            for row in range(len(source))
            for pair in unequal_pairs(source.read(row).get(self._column), meaning) or [()]
        ]

    def rows(self) -> int:
        return len(self._pairs)

    def __len__(self) -> int:
        return self.rows()  # ``max_rows`` is about the rows of the other source

    def read(self, index: int) -> dict[str, Any]:
        row, pair = self._pairs[index]
        columns = self._source.read(row)
        return {**columns, self._column: [columns[self._column][i] for i in pair]} if pair else columns

    def location(self, index: int) -> str:
        row, pair = self._pairs[index]
        answers = f", answers {' and '.join(str(i + 1) for i in pair)}" if pair else ""
        return self._source.location(row) + answers


def all_pairs(sources: list[Source]) -> list[Source]:
    """The sources, with ranked answers converted to :class:`RankedPairs`. Raises DataError if no source has ranked
    answers."""
    ranked = [source.layout is not None and source.layout.conversion in _SCORED for source in sources]
    if not any(ranked):
        names = ", ".join(repr(source.name) for source in sources)
        raise DataError(
            "data.pairs = 'all' is for rows with a list of answers, each with a rank or a score (UltraFeedback, "
            f"Nectar); the sources {names} have no such rows. Remove the option."
        )
    return [RankedPairs(source) if has else source for source, has in zip(sources, ranked, strict=True)]
