"""Characters of a text and the tokens that they became: whether it can be told which tokens an answer begins and ends
with."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence

Span = tuple[int, int]
"""[start, end) in characters."""


def edges_are_between(offsets: Sequence[Span], edges: Iterable[int]) -> bool:
    """Whether every edge lies between two tokens, and it is certain between which.

    Tokenizers may leave white space out of the characters that they report for a token (``trim_offsets`` of byte-level
    ones, as Pythia's): a token ``" 42"`` then claims to begin at its ``4``, and one of spaces alone has no characters.
    So at characters that no token claims nothing is certain.

    Args:
        offsets: characters of each token, in order. Several tokens may have the same (bytes of one character).
        edges: positions in the text.
    """
    at = sorted(edges)
    claimed = 0
    """End of the characters claimed so far."""
    for start, end in offsets:
        if start == end and bisect_left(at, start) < bisect_right(at, start):
            return False
        if start > claimed and bisect_left(at, claimed) < bisect_right(at, start):
            return False
        if bisect_right(at, start) < bisect_left(at, end):
            return False
        claimed = max(claimed, end)
    return True
