"""Chooses engines for single requests, so that an engine that holds the keys and values of a prefix gets the request.

Without this, the next turn of a long conversation would usually go to an engine that has to compute all of it again.
"""

from __future__ import annotations

import zlib
from collections import OrderedDict
from collections.abc import Mapping

from rlhf.types.arrays import IntArray

Mark = tuple[int, int]
"""(length of a prefix in tokens, checksum of its tokens)."""
SHORTEST = 16
"""Tokens of the shortest prefix that is looked at."""
GROWTH = 1.25
"""Each further prefix is so many times longer. So at least 80 % of what two requests share is found."""
LIMIT = 2**18
"""Prefixes that are remembered."""


def prefix_marks(ids: IntArray) -> list[Mark]:
    """Prefixes of a request, the shortest first; the last one is all of it. Checksums of different tokens may be equal:
    the request then goes to an engine that does not know its prefix, and is computed like any other."""
    view, size = memoryview(ids).cast("B"), ids.itemsize
    marks, checksum, start, length = list[Mark](), 0, 0, SHORTEST
    while start < len(ids):
        end = min(length, len(ids))
        checksum = zlib.crc32(view[start * size : end * size], checksum)
        marks.append((end, checksum))
        start, length = end, int(length * GROWTH)
    return marks


class Prefixes:
    """Remembers which engine was given which prefix last."""

    def __init__(self) -> None:
        self._engines: OrderedDict[Mark, int] = OrderedDict()

    def choose(self, marks: list[Mark], loads: Mapping[int, int]) -> int:
        """The engine that knows the longest prefix of the request. An engine with over a quarter more requests than the
        one with the fewest is left out. If no engine knows a prefix, the one with the fewest.

        Args:
            marks: of the request.
            loads: {engine that can be chosen: its number of requests}, at least one.
        """
        fewest = min(loads.values())
        most = fewest + max(1, fewest // 4)
        engines = (self._engines[mark] for mark in reversed(marks) if mark in self._engines)
        choice = next((engine for engine in engines if loads.get(engine, most + 1) <= most), None)
        if choice is None:
            choice = min(loads, key=lambda engine: loads[engine])
        for mark in marks:
            self._engines[mark] = choice
            self._engines.move_to_end(mark)
        while len(self._engines) > LIMIT:
            self._engines.popitem(last=False)
        return choice
