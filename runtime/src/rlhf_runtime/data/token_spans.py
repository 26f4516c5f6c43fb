"""Character offsets of tokens: whether the first and last token of an answer are certain."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence

Span = tuple[int, int]
"""[start, end) in characters."""


def edges_are_between(offsets: Sequence[Span], edges: Iterable[int]) -> bool:
    """Whether every edge is certainly between two tokens.

    Some tokenizers omit white space from the characters that they report for a token (``trim_offsets`` of byte-level
    ones, such as Pythia's): a token ``" 42"`` is reported to begin at its ``4``, and a token of spaces alone has no
    characters. So positions at characters that no token reports are uncertain.

    Args:
        offsets: characters of each token, in order. Several tokens may have the same (bytes of one character).
        edges: positions in the text.
    """
    at = sorted(edges)
    claimed = 0
    """End of the characters reported so far."""
    for start, end in offsets:
        if start == end and bisect_left(at, start) < bisect_right(at, start):
            return False
        if start > claimed and bisect_left(at, claimed) < bisect_right(at, start):
            return False
        if bisect_right(at, start) < bisect_left(at, end):
            return False
        claimed = max(claimed, end)
    return True
