"""The pool that the launcher ``simulated`` creates from a :class:`SimulatedGenerator`, for single requests."""

from __future__ import annotations

import asyncio
import threading
import time
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from rlhf.interfaces import ComponentConfig, EnginePool, GeneratorSpec
from rlhf.types import GenerationRequest, Turn

from rlhf_plugin_simulated.generator import SimulatedGenerator


@dataclass(slots=True)
class _Load:
    """New weights, from the time when the engines paused to the time when they continued."""

    version: int
    begin: float
    end: float


class SimulatedPool(SimulatedGenerator, EnginePool):
    """Answers each request on the event loop, after the time that an engine would need."""

    def __init__(self, config: ComponentConfig | None, spec: GeneratorSpec) -> None:
        super().__init__(config, spec)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._engines = Engines(self.config.engines)
        self._slots = asyncio.Semaphore(self.config.engines * self.config.slots)
        self._open = asyncio.Event()
        self._open.set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._under_way = 0
        self._loads: list[_Load] = []
        self._paused_at = 0.0
        self._restarted: Counter[str] = Counter()

    async def answer(self, request: GenerationRequest) -> Turn:
        self._loop = asyncio.get_running_loop()
        async with self._slots:
            await self._open.wait()
            engine = self._begin()
            try:
                while True:
                    versions = await self._sample(self._seconds(request))
                    if not self._dies():
                        return self._turn(request, versions)
                    self._restarted["engine"] += self._count(request)
            finally:
                self._end(engine)

    async def _sample(self, seconds: float) -> tuple[tuple[int, int], ...]:
        """Wait until the tokens are drawn. Returns the versions of the weights that drew them."""
        versions, start, load_count = [(0, self.version)], time.monotonic(), len(self._loads)
        wait, draw_seconds = seconds, 0.0
        # New weights may have arrived while the last tokens were drawn.
        while wait > 0 or len(self._loads) > load_count:
            await asyncio.sleep(wait)
            if self.spec.in_flight != "drain":  # a drain waits for this sample
                await self._open.wait()
            loads = self._loads[load_count:]
            load_count += len(loads)
            for load in loads:
                draw_seconds = min(seconds, draw_seconds + max(0.0, load.begin - start))
                start = load.end
                if draw_seconds == seconds:
                    continue
                tokens = int(draw_seconds * self.config.tokens_per_second * self.config.speed)
                if self.spec.in_flight == "restart":
                    versions, draw_seconds = [(0, load.version)], 0.0
                    self._restarted["weights"] += tokens
                else:
                    versions.append((tokens, load.version))
            wait = seconds - draw_seconds - (time.monotonic() - start)
        return tuple(versions)

    def restarted(self) -> Mapping[str, int]:
        tokens, self._restarted = dict(self._restarted), Counter()
        return tokens

    def idle(self) -> tuple[float, float]:
        return self._engines.idle()

    def _begin(self) -> int:
        self._under_way += 1
        self._idle.clear()
        return self._engines.begin()

    def _end(self, engine: int) -> None:
        self._engines.end(engine)
        self._under_way -= 1
        if not self._under_way:
            self._idle.set()

    def pause(self) -> None:
        self._paused_at = time.monotonic()
        if self._loop is not None:
            asyncio.run_coroutine_threadsafe(self._hold(), self._loop).result()

    def resume(self) -> None:
        self._loads.append(_Load(self.version, self._paused_at, time.monotonic()))
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._open.set)

    async def _hold(self) -> None:
        """Let no sample start until the load ends. ``drain``: wait for the samples that have started."""
        self._open.clear()
        if self.spec.in_flight == "drain":
            await self._idle.wait()


class Engines:
    """Counts the requests of each engine. Requests begin and end on one thread; :meth:`idle` may be called on another.

    Args:
        clock: returns seconds.
    """

    def __init__(self, count: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._requests, self._clock, self._lock = [0] * count, clock, threading.Lock()
        self._by_requests = [(0, engine) for engine in range(count)]
        """(number of requests, engine), sorted, so that a request does not search a thousand engines."""
        self._idle_engines = count
        """Engines without a request."""
        self._idle = self._all = 0.0
        self._counted_until = clock()
        """Time up to which the seconds are counted."""

    def begin(self) -> int:
        """Assign a request to the engine with the fewest requests. Returns the engine."""
        with self._lock:
            self._count()
            engine = self._by_requests[0][1]
            self._change(engine, 1)
        return engine

    def end(self, engine: int) -> None:
        """Remove a request of ``engine``, which was answered or dropped."""
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
        old_count = self._requests[engine]
        self._requests[engine] = new_count = old_count + by
        del self._by_requests[bisect_left(self._by_requests, (old_count, engine))]
        insort(self._by_requests, (new_count, engine))
        self._idle_engines += (new_count == 0) - (old_count == 0)

    def _count(self) -> None:
        time_s = self._clock()
        seconds, self._counted_until = time_s - self._counted_until, time_s
        self._idle += seconds * self._idle_engines
        self._all += seconds * len(self._requests)
