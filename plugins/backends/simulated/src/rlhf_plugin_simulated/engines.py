"""Which simulated engine works on a request, and for how long engines have none."""

from __future__ import annotations

import threading
import time
from bisect import bisect_left, insort
from collections.abc import Callable


class Engines:
    """Counts the requests of each engine. Requests begin and end on one thread; :meth:`idle` may be called on another.

    Args:
        clock: seconds.
    """

    def __init__(self, count: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._requests, self._clock, self._lock = [0] * count, clock, threading.Lock()
        self._by_requests = [(0, engine) for engine in range(count)]
        """(requests, engine), sorted: of a thousand engines not each is looked at for a request."""
        self._without = count
        """Engines without a request."""
        self._idle = self._all = 0.0
        self._counted = clock()
        """Time up to which the seconds are counted."""

    def begin(self) -> int:
        """A request goes to the engine with the fewest. Returns the engine."""
        with self._lock:
            self._count()
            engine = self._by_requests[0][1]
            self._change(engine, 1)
        return engine

    def end(self, engine: int) -> None:
        """A request of ``engine`` is answered or dropped."""
        with self._lock:
            self._count()
            self._change(engine, -1)

    def idle(self) -> tuple[float, float]:
        """(engine seconds without a request, engine seconds) since the last call."""
        with self._lock:
            self._count()
            seconds = self._idle, self._all
            self._idle = self._all = 0.0
        return seconds

    def _change(self, engine: int, by: int) -> None:
        before = self._requests[engine]
        self._requests[engine] = after = before + by
        del self._by_requests[bisect_left(self._by_requests, (before, engine))]
        insort(self._by_requests, (after, engine))
        self._without += (after == 0) - (before == 0)

    def _count(self) -> None:
        now = self._clock()
        seconds, self._counted = now - self._counted, now
        self._idle += seconds * self._without
        self._all += seconds * len(self._requests)
