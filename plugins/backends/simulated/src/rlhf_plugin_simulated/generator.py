"""The generator ``simulated``: engines that take time and draw random tokens."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from array import array
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Annotated, ClassVar

from pydantic import Field
from rlhf.errors import SyncError
from rlhf.interfaces import ComponentConfig, Generator, GeneratorSpec, Proof
from rlhf.types import GenerationRequest, Image, Turn
from rlhf.weights.bucket import Bucket

from rlhf_plugin_simulated.delays import log_normal

SLICE = 0.05
"""Seconds between two looks for complete samples in :meth:`SimulatedGenerator.generate`."""
_TOKENS = bytes(3 + n % 29 for n in range(256))
"""Translates random bytes to token ids from 3 to 31."""


class SimulatedGeneratorConfig(ComponentConfig):
    engines: Annotated[int, Field(gt=0)] = 1
    """Engines that are simulated."""
    slots: Annotated[int, Field(gt=0)] = 64
    """Samples that an engine works on at once. Further ones wait."""
    tokens: Annotated[float, Field(gt=0)] = 200.0
    """Mean number of tokens of an answer, cut at ``sampling.max_new_tokens``."""
    tokens_sigma: Annotated[float, Field(ge=0)] = 0.5
    """Standard deviation of the logarithm of that number; 0: every answer has the mean."""
    tokens_per_second: Annotated[float, Field(gt=0)] = 50.0
    """Of one sample, whatever else its engine works on."""
    deaths: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of the samples during which their engine dies. They are sampled again."""
    load_seconds: Annotated[float, Field(ge=0)] = 0.0
    """Seconds in which engines take new weights. No token is sampled meanwhile."""
    speed: Annotated[float, Field(gt=0)] = 1.0
    """Simulated seconds per second."""


@dataclass(slots=True)
class _Load:
    """New weights, from the moment when the engines paused to the moment when they went on."""

    version: int
    begin: float
    end: float


class SimulatedGenerator(Generator):
    """Tokens and lengths depend on the seed of the request alone; log-probs are -1."""

    name = "simulated"
    capabilities: ClassVar[frozenset[str]] = frozenset({"accept:tensors", "logprobs", "seeds", "answers"})
    Config = SimulatedGeneratorConfig

    def __init__(self, config: ComponentConfig | None, spec: GeneratorSpec) -> None:
        self.config: SimulatedGeneratorConfig = self.Config() if config is None else config  # type: ignore[assignment]
        self.spec = spec
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
        self._loading: tuple[int, dict[str, str]] | None = None
        self._restarted: Counter[str] = Counter()
        self._deaths = random.Random(spec.seed)
        self._samples = Samples(self.config.engines * self.config.slots)
        """Tokens so far of the unfinished samples of :meth:`advance`."""

    # ------------------------------------------------------------------------------------- samples

    def generate(self, requests: Sequence[GenerationRequest]) -> Iterator[tuple[int, Turn]]:
        count = len(requests)
        samples = self._new_samples(dict(enumerate(requests)))
        while count:
            complete = samples.advance(SLICE, self._dies)
            count -= len(complete)
            yield from ((position, self._turn(s.request, tuple(s.versions))) for position, s in complete)

    def advance(
        self, requests: Mapping[int, GenerationRequest], dropped: Sequence[int] = (), seconds: float = 0.0
    ) -> list[tuple[int, Turn]]:
        for name in dropped:
            self._samples.unfinished.pop(name, None)
        self._samples.unfinished |= self._new_samples(requests).unfinished
        one_token = 1 / self.config.tokens_per_second / self.config.speed
        complete = self._samples.advance(max(seconds, one_token), self._dies)
        return [(name, self._turn(s.request, tuple(s.versions))) for name, s in complete]

    def _new_samples(self, requests: Mapping[int, GenerationRequest]) -> Samples:
        samples = Samples(self.config.engines * self.config.slots)
        for name, request in requests.items():
            samples.unfinished[name] = Sample(request, self._seconds(request), [(0, self.version)])
        return samples

    def _dies(self) -> bool:
        return self._deaths.random() < self.config.deaths

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
        """Wait until the tokens are drawn. Returns which weights drew them."""
        versions, start, load_count = [(0, self.version)], time.monotonic(), len(self._loads)
        wait, draw_seconds = seconds, 0.0
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
                whole = int(draw_seconds * self.config.tokens_per_second * self.config.speed)
                if self.spec.in_flight == "restart":
                    versions, draw_seconds = [(0, load.version)], 0.0
                    self._restarted["weights"] += whole
                else:
                    versions.append((whole, load.version))
            wait = seconds - draw_seconds - (time.monotonic() - start)
        return tuple(versions)

    def unfinished_tokens(self) -> int:
        """Of :meth:`advance`."""
        return self._samples.tokens_drawn(self._count)

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

    def _count(self, request: GenerationRequest) -> int:
        """Tokens of the answer."""
        tokens = log_normal(random.Random(request.seed), self.config.tokens, self.config.tokens_sigma)
        return max(1, min(round(tokens), request.sampling.max_new_tokens))

    def _seconds(self, request: GenerationRequest) -> float:
        return self._count(request) / self.config.tokens_per_second / self.config.speed

    def _turn(self, request: GenerationRequest, versions: tuple[tuple[int, int], ...]) -> Turn:
        count = self._count(request)
        ids = array("i", list(random.Random(request.seed).randbytes(count).translate(_TOKENS)))
        full = count == request.sampling.max_new_tokens
        if not full:
            ids[-1] = self.spec.eos_token_ids[0]
        spans = {min(first, count - 1): version for first, version in versions}
        return Turn(
            ids,
            True,
            array("f", [-1.0]) * count,
            tuple(sorted(spans.items())),
            "length" if full else "stop",
            request.sampling.temperature or 1.0,
            text=str(count),
        )

    # ------------------------------------------------------------------------------------- weights

    def pause(self) -> None:
        self._paused_at = time.monotonic()
        if self._loop is not None:
            asyncio.run_coroutine_threadsafe(self._hold(), self._loop).result()

    def resume(self) -> None:
        self._loads.append(_Load(self.version, self._paused_at, time.monotonic()))
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._open.set)

    def begin_load(self, version: int) -> None:
        self._loading = version, {}

    def take(self, bucket: Bucket) -> None:
        if self._loading is None:
            raise SyncError("take() without begin_load()")
        self._loading[1].update(bucket.received())

    def end_load(self) -> list[Proof]:
        if self._loading is None:
            raise SyncError("end_load() without begin_load()")
        self.version, received = self._loading
        self._loading = None
        self._samples.change_version(self.version, self.spec.in_flight == "restart", self._count)
        time.sleep(self.config.load_seconds / self.config.speed)
        return [Proof(self.version, received=received, dtype="fp32")]

    def logprobs(
        self, sequences: Sequence[Sequence[int]], images: Sequence[tuple[Image, ...]] = ()
    ) -> list[list[list[float]]]:
        return [[[0.0] * (len(ids) - 1) for ids in sequences]]

    async def _hold(self) -> None:
        """No sample starts until the load ends. ``drain``: wait for those that have started."""
        self._open.clear()
        if self.spec.in_flight == "drain":
            await self._idle.wait()


@dataclass(slots=True)
class Sample:
    request: GenerationRequest
    seconds: float
    """Of the whole answer."""
    versions: list[tuple[int, int]]
    """(first token, version of the weights that drew it and its successors)."""
    seconds_left: float = field(init=False)
    """Seconds until the answer is complete."""

    def __post_init__(self) -> None:
        self.seconds_left = self.seconds


class Samples:
    """Unfinished samples of an engine that is asked in slices.

    Args:
        places: samples that are worked on at once; the others wait, in order.
    """

    def __init__(self, places: int) -> None:
        self._places = places
        self.unfinished: dict[int, Sample] = {}

    def advance(self, seconds: float, again: Callable[[], bool]) -> list[tuple[int, Sample]]:
        """Take about ``seconds``; returns the samples that are complete.

        Args:
            again: asked for each of them: whether it is sampled again.
        """
        end, complete = time.monotonic() + seconds, list[tuple[int, Sample]]()
        while self.unfinished:
            running = dict(islice(self.unfinished.items(), self._places))
            step = min(min(sample.seconds_left for sample in running.values()), end - time.monotonic())
            time.sleep(max(0.0, step))
            for name, sample in running.items():
                sample.seconds_left -= max(0.0, step)
                if sample.seconds_left <= 0 and again():
                    sample.seconds_left, sample.versions = sample.seconds, [(0, sample.versions[-1][1])]
                elif sample.seconds_left <= 0:
                    complete.append((name, self.unfinished.pop(name)))
            if time.monotonic() >= end:
                break
        return complete

    def tokens_drawn(self, count: Callable[[GenerationRequest], int]) -> int:
        """Tokens so far of the unfinished samples; ``count``: as for :meth:`change_version`."""
        return sum(round(count(s.request) * (1 - s.seconds_left / s.seconds)) for s in self.unfinished.values())

    def change_version(self, version: int, restart: bool, count: Callable[[GenerationRequest], int]) -> None:
        """New weights draw the tokens that are missing; with ``restart`` all tokens.

        Args:
            count: tokens of the whole answer.
        """
        for sample in self.unfinished.values():
            if restart:
                sample.seconds_left, sample.versions = sample.seconds, [(0, version)]
            elif sample.versions[-1][1] != version:
                tokens = round(count(sample.request) * (1 - sample.seconds_left / sample.seconds))
                sample.versions.append((tokens, version))


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
