"""Where a stop string ends a sample, found token by token with the run's own decoder."""

from __future__ import annotations

from collections.abc import Callable, Sequence

CONTEXT = 8
"""Tokens before the new ones that are decoded with them: how a token reads can depend on its neighbours."""


class StopSearch:
    """``end(ids)``: how many of ``ids`` there are up to and with the token that completes one of ``stops``, or None.

    Call it with a growing list; what was searched before is not decoded again beyond a few tokens and the characters
    of the longest stop string.
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
        """Whether the text that ends with the last of ``ids`` holds a stop string that it did not hold before."""
        first = max(0, len(ids) - self._window(ids))
        return any(stop in self._decode(ids[first:]) for stop in self._stops)

    def _window(self, ids: Sequence[int]) -> int:
        """Last tokens whose text is at least as long as the longest stop string, and the context before them."""
        count = 1
        while count < len(ids) and len(self._decode(ids[len(ids) - count :])) <= self._longest:
            count *= 2
        return min(len(ids), count + CONTEXT)
