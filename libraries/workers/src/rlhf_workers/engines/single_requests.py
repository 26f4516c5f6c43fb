"""Single requests: engines sample continuously, and each request is answered as soon as it is done.

::

    submit ──► waiting ──► an engine (Prefixes.choose): advance(new, dropped, SLICE) ──► done(turn)
                  ▲                          │ the engine died
                  └──────────────────────────┘

One thread calls the engines. An engine has up to two calls of :meth:`AnswersRequests.advance` at a time, so that it
keeps sampling while the answer to the first call is in transit. Between :meth:`hold` and :meth:`release` no call is
active, and only the main thread uses the engines.
"""

from __future__ import annotations

import threading
import time
import zlib
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from itertools import count
from typing import Any

from rlhf.errors import WorkerError
from rlhf.types import GenerationRequest, Turn
from rlhf.types.arrays import IntArray

from rlhf_workers.engines.pool import EngineWorkers
from rlhf_workers.process.payload import unpack

SLICE = 0.02
"""Seconds that an engine samples in one call. A new request waits about this long until its engine reads it."""
_CALLS = 2
"""Maximum number of active calls per engine."""

Settle = Callable[[Turn | Exception], None]


@dataclass(slots=True)
class _Open:
    """A request without an answer."""

    request: GenerationRequest
    settle: Settle
    marks: list[Mark]
    engine: int | None = None
    """The engine that samples the request; None: not assigned yet."""


class EngineRequests:
    """``settle`` of a request is called once, on the thread of this class, with the turn or with the error that ends
    the run. It is not called for a request that was cancelled."""

    def __init__(self, pool: EngineWorkers) -> None:
        self._pool = pool
        self._watchdog = pool.watch([], "advance()")
        self._names = count()
        self._condition = threading.Condition()
        """Guards everything below."""
        self._open: dict[int, _Open] = {}
        self._waiting: deque[int] = deque()
        self._prefixes = Prefixes()
        self._shares: defaultdict[int, set[int]] = defaultdict(set)
        """{engine: its requests}."""
        self._new: defaultdict[int, dict[int, GenerationRequest]] = defaultdict(dict)
        """{engine: requests that were not sent to it yet}."""
        self._dropped: defaultdict[int, list[int]] = defaultdict(list)
        """{engine: cancelled requests that it does not know of yet}."""
        self._calls: dict[Any, int] = {}
        """{reference of a call: engine}."""
        self._tokens: dict[int, int] = {}
        """{engine: number of tokens of its unfinished requests, after its latest call}."""
        self._restarted: Counter[str] = Counter()
        """{cause: number of tokens that were sampled and discarded}."""
        self._holds = 0
        self._drain = self._closed = False
        self._failure: Exception | None = None
        self._counted_until, self._idle, self._total = time.monotonic(), 0.0, 0.0
        self._thread = threading.Thread(target=self._serve, name="rlhf-engines", daemon=True)
        self._thread.start()

    # ----------------------------------------------------------------------------- from other threads

    def submit(self, request: GenerationRequest, settle: Settle) -> int:
        """Returns a name for :meth:`cancel`."""
        marks = prefix_marks(request.ids)
        with self._condition:
            if self._failure is not None or self._closed:
                raise self._failure or WorkerError("the engines were shut down")
            name = next(self._names)
            self._open[name] = _Open(request, settle, marks)
            self._waiting.append(name)
            self._condition.notify_all()
        return name

    def cancel(self, name: int) -> None:
        """Drop a request. Does nothing if it is already answered."""
        with self._condition:
            pending = self._open.pop(name, None)
            if pending is not None and pending.engine is not None:
                self._shares[pending.engine].discard(name)
                # An engine must be told only of requests that were already sent to it.
                if self._new[pending.engine].pop(name, None) is None:
                    self._dropped[pending.engine].append(name)

    def hold(self, drain: bool) -> None:
        """Wait until no call is active, and start none until :meth:`release`. Holds may be nested.

        Args:
            drain: wait until the engines have answered all requests that they started.
        """
        with self._condition:
            self._holds, self._drain = self._holds + 1, drain
            self._condition.notify_all()
            self._condition.wait_for(
                lambda: self._failure or not (self._calls or (drain and any(self._shares.values())))
            )
            if self._failure is not None:
                raise self._failure

    def release(self) -> None:
        """End one :meth:`hold`."""
        with self._condition:
            self._holds -= 1
            self._condition.notify_all()

    def idle(self) -> tuple[float, float]:
        """(engine seconds without a request, engine seconds) since the last call."""
        with self._condition:
            self._count_idle()
            seconds = self._idle, self._total
            self._idle = self._total = 0.0
        return seconds

    def unfinished_tokens(self) -> int:
        """Number of tokens sampled so far for unanswered requests, as the engines' latest calls reported them."""
        with self._condition:
            return sum(self._tokens.values())

    def restarted(self) -> dict[str, int]:
        """{cause: number of tokens that were sampled and discarded} since the last call."""
        with self._condition:
            tokens, self._restarted = dict(self._restarted), Counter()
        return tokens

    def begin_again(self) -> None:
        """During a :meth:`hold`: make the engines sample all their requests again from the first token."""
        with self._condition:
            self._restarted["weights"] += sum(self._tokens.values())
            self._tokens = {}

    def replaced(self, engines: Collection[int]) -> None:
        """During a :meth:`hold`: these engines were replaced by new ones, which have no requests."""
        with self._condition:
            for engine in engines:
                self._give_back(engine)

    def close(self) -> None:
        """End the thread. Unanswered requests never get an answer."""
        with self._condition:
            self._closed = True
            self._condition.notify_all()
        self._thread.join()

    # ------------------------------------------------------------------- on the thread of this class

    def _serve(self) -> None:
        try:
            while self._begin_calls():
                for ref in self._watchdog.wait(list(self._calls), SLICE):
                    if ref in self._calls:  # false for an engine that died
                        self._take(ref)
        except Exception as error:
            with self._condition:
                self._failure = error
                failed, self._open, self._calls = list(self._open.values()), {}, {}
                self._condition.notify_all()
            for pending in failed:
                pending.settle(error)

    def _begin_calls(self) -> bool:
        """Wait until there is a call to wait for. Returns False after :meth:`close`."""
        with self._condition:
            while not self._closed:
                self._count_idle()
                if not self._holds:
                    self._assign()
                # A drain continues to call, because engines sample only during calls.
                if not self._holds or self._drain:
                    self._call()
                if self._calls:
                    return True
                self._condition.notify_all()  # to hold()
                self._condition.wait()
            return False

    def _alive(self) -> list[int]:
        return [engine for engine in self._pool.members if engine not in self._pool.dead]

    def _assign(self) -> None:
        """Assign waiting requests to engines."""
        alive = self._alive()
        while self._waiting and alive:
            name = self._waiting.popleft()
            pending = self._open.get(name)
            if pending is None:  # cancelled
                continue
            pending.engine = self._prefixes.choose(
                pending.marks, {engine: len(self._shares[engine]) for engine in alive}
            )
            self._shares[pending.engine].add(name)
            self._new[pending.engine][name] = pending.request

    def _call(self) -> None:
        """Call the engines that have work."""
        under_way = Counter(self._calls.values())
        for engine in self._alive():
            if under_way[engine] == _CALLS or not (self._shares[engine] or self._dropped[engine]):
                continue
            new, dropped = self._new.pop(engine, {}), self._dropped.pop(engine, [])
            self._calls[self._pool.begin(engine, "advance", new, dropped, SLICE)] = engine
            self._watchdog.join(self._pool.members[engine])

    def _take(self, ref: Any) -> None:
        """Hand over the turns of a finished call."""
        engine = self._calls[ref]
        answer = self._pool.answer(engine, "advance", ref)
        finished: list[tuple[Settle, Turn]] = []
        with self._condition:
            self._count_idle()
            del self._calls[ref]
            if answer is None:
                self._give_back(engine)
            else:
                turns, self._tokens[engine] = unpack(answer)[0]
                for name, turn in turns:
                    self._shares[engine].discard(name)
                    if (pending := self._open.pop(name, None)) is not None:
                        finished.append((pending.settle, turn))
            if engine not in self._calls.values():
                self._watchdog.leave(self._pool.members[engine])
        for settle, turn in finished:
            settle(turn)

    def _give_back(self, engine: int) -> None:
        """Put the requests of a dead engine back at the front of the queue."""
        if tokens := self._tokens.pop(engine, 0):
            self._restarted["engine"] += tokens
        # appendleft() reverses the order again: the oldest request is sampled first.
        for name in sorted(self._shares.pop(engine, ()), reverse=True):
            self._open[name].engine = None
            self._waiting.appendleft(name)
        self._new.pop(engine, None)
        self._dropped.pop(engine, None)
        self._calls = {ref: other for ref, other in self._calls.items() if other != engine}

    def _count_idle(self) -> None:
        time_s = time.monotonic()
        seconds, self._counted_until = time_s - self._counted_until, time_s
        engines = len(self._pool.members)
        self._total += seconds * engines
        self._idle += seconds * (engines - sum(bool(share) for share in self._shares.values()))


Mark = tuple[int, int]
"""(length of a prefix in tokens, checksum of its tokens)."""
SHORTEST = 16
"""Number of tokens of the shortest prefix that is compared."""
GROWTH = 1.25
"""Ratio of the lengths of successive prefixes. At least 80 % of the shared tokens of two requests are thus detected."""
LIMIT = 2**18
"""Maximum number of prefixes in memory."""


def prefix_marks(ids: IntArray) -> list[Mark]:
    """Prefixes of a request, the shortest first; the last one is the whole request. Different tokens may have equal
    checksums. The request then goes to an engine that does not hold its prefix, and is computed like any other."""
    view, size = memoryview(ids).cast("B"), ids.itemsize
    marks, checksum, start, length = list[Mark](), 0, 0, SHORTEST
    while start < len(ids):
        end = min(length, len(ids))
        checksum = zlib.crc32(view[start * size : end * size], checksum)
        marks.append((end, checksum))
        start, length = end, int(length * GROWTH)
    return marks


class Prefixes:
    """Records which engine received each prefix last. A request goes to the engine that holds the keys and values of
    its prefix. Otherwise the next turn of a long conversation would usually go to an engine that must compute the whole
    conversation again."""

    def __init__(self) -> None:
        self._engines: OrderedDict[Mark, int] = OrderedDict()

    def choose(self, marks: list[Mark], loads: Mapping[int, int]) -> int:
        """The engine with the longest prefix of the request, or the one with the fewest requests if none has a prefix.
        Engines with over a quarter more requests than the least loaded engine are left out.

        Args:
            marks: the marks of the request.
            loads: {available engine: its number of requests}, at least one.
        """
        fewest = min(loads.values())
        limit = fewest + max(1, fewest // 4)
        engines = (self._engines[mark] for mark in reversed(marks) if mark in self._engines)
        choice = next((engine for engine in engines if loads.get(engine, limit + 1) <= limit), None)
        if choice is None:
            choice = min(loads, key=lambda engine: loads[engine])
        for mark in marks:
            self._engines[mark] = choice
            self._engines.move_to_end(mark)
        while len(self._engines) > LIMIT:
            self._engines.popitem(last=False)
        return choice
