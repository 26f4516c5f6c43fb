"""Detects stop strings while tokens arrive one at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence

REPLACEMENT = "\ufffd"
"""The character that tokenizers return for an incomplete UTF-8 sequence."""


class StopScanner:
    """Searches the text of one sample. ``feed(token)`` returns True once the text contains one of ``stops``.

    Text is decoded incrementally: a few tokens of context are decoded with and without the new ones, so the cost per
    token does not grow with the sample. A stop string is found inside one token, at its end, or over several tokens.
    If a token ends in the middle of a multi-byte character, its text is searched when the character is complete.
    """

    __slots__ = ("_context", "_decode", "_end", "_ids", "_keep", "_stops", "_tail")

    def __init__(self, stops: Sequence[str], decode: Callable[[Sequence[int]], str]) -> None:
        self._stops = tuple(stops)
        self._decode = decode
        self._keep = max(map(len, stops)) - 1
        self._ids: list[int] = []
        self._context = 0
        """Start of the tokens that are decoded again with new tokens (``ids[context:end]``), because a token's text can
        depend on the token before it."""
        self._end = 0
        self._tail = ""
        """The last characters seen, one fewer than the longest stop string."""

    def feed(self, token: int) -> bool:
        self._ids.append(token)
        old = self._decode(self._ids[self._context : self._end])
        text = self._decode(self._ids[self._context :])
        new = text[len(old) :]
        window = self._tail + new.rstrip(REPLACEMENT)
        if new and not new.endswith(REPLACEMENT):
            self._context, self._end = self._end, len(self._ids)
            self._tail = window[-self._keep :] if self._keep else ""
        return any(stop in window for stop in self._stops)
