"""Which simulated engine works on a request, and for how long engines have none."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class Engines:
    """Counts the requests of each engine. Requests begin and end on one thread; :meth:`idle` may be called on another.

    Args:
        clock: seconds.
    """

    def __init__(self, count: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._requests, self._clock, self._lock = [0] * count, clock, threading.Lock()
        self._idle = self._all = 0.0
        self._counted = clock()
        """Time up to which the seconds are counted."""

    def begin(self) -> int:
        """A request goes to the engine with the fewest. Returns the engine."""
        with self._lock:
            self._count()
            engine = min(range(len(self._requests)), key=self._requests.__getitem__)
            self._requests[engine] += 1
        return engine

    def end(self, engine: int) -> None:
        """A request of ``engine`` is answered or dropped."""
        with self._lock:
            self._count()
            self._requests[engine] -= 1

    def idle(self) -> tuple[float, float]:
        """(engine seconds without a request, engine seconds) since the last call."""
        with self._lock:
            self._count()
            found = self._idle, self._all
            self._idle = self._all = 0.0
        return found

    def _count(self) -> None:
        now = self._clock()
        seconds, self._counted = now - self._counted, now
        self._idle += seconds * self._requests.count(0)
        self._all += seconds * len(self._requests)
