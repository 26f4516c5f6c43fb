"""Finds the token at which a stop string ends a sample, with the run's own decoder."""

from __future__ import annotations

from collections.abc import Callable, Sequence

CONTEXT = 8
"""Number of earlier tokens that are decoded together with new ones, because the text of a token can depend on them."""


class StopSearch:
    """``end(ids)``: the number of tokens up to and including the one that completes a stop string, or None.

    Call it with a growing list. Of the tokens that were searched before, it decodes only a few again: CONTEXT, and as
    many as the longest stop string covers.
    """

    def __init__(self, stops: Sequence[str], decode: Callable[[Sequence[int]], str]) -> None:
        self._stops, self._decode = tuple(stops), decode
        self._longest = max(map(len, stops))
        self._searched = 0

    def end(self, ids: Sequence[int]) -> int | None:
        while self._searched < len(ids):
            self._searched += 1
            if self._holds(ids[: self._searched]):
                return self._searched
        return None

    def _holds(self, ids: Sequence[int]) -> bool:
        """Whether the last token of ``ids`` completes a stop string."""
        first = max(0, len(ids) - self._window(ids))
        return any(stop in self._decode(ids[first:]) for stop in self._stops)

    def _window(self, ids: Sequence[int]) -> int:
        """Number of last tokens whose text is longer than the longest stop string, plus CONTEXT."""
        count = 1
        while count < len(ids) and len(self._decode(ids[len(ids) - count :])) <= self._longest:
            count *= 2
        return min(len(ids), count + CONTEXT)
