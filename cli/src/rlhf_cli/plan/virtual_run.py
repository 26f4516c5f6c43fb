"""The steps of a run on a virtual clock. The run's own stream, rollouts and requests create the batches. Engines,
environments, rewards, learning and weight syncs only take the time that ``Speeds`` states."""

from __future__ import annotations

import asyncio
import heapq
import random
import selectors
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, TypeVar

from rlhf.interfaces.curriculum import Outcome
from rlhf.types import Group, Row, Trajectory
from rlhf_runtime.config.sections import StreamSection
from rlhf_runtime.samples.acceptance import Acceptance
from rlhf_runtime.samples.continuous_stream import ContinuousStream
from rlhf_runtime.samples.rollout_settings import RolloutSettings
from rlhf_runtime.samples.rollouts import Rollouts
from rlhf_runtime.samples.sample_context import SampleParts
from rlhf_runtime.samples.stream import Stream, WaveStream

from rlhf_cli.plan.speeds import Speeds

T = TypeVar("T")
ENDLESS = 10**9
"""Number of steps of the stream. The plan describes the middle of a long run."""


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock jumps to the next timer when nothing else is left to do."""

    def __init__(self) -> None:
        self.clock = 0.0
        super().__init__(_Jump(self))

    def time(self) -> float:
        return self.clock


class _Jump(selectors.SelectSelector):
    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise RuntimeError("no timer is set, so the virtual clock cannot advance")
        self._loop.clock += max(0.0, timeout)
        return []


class VirtualMain:
    """Replaces :class:`rlhf_runtime.calls.main_thread.MainThread`."""

    def __init__(self) -> None:
        self.loop = VirtualLoop()
        self.after = 0.0
        """Seconds from the start of a job to the moment at which it hands something over."""

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return self.loop.run_until_complete(coroutine)

    async def call(self, function: Callable[[], T]) -> T:
        self.after = 0.0
        result = function()
        await asyncio.sleep(self.after)
        return result

    def from_main(self, function: Callable[[], None]) -> None:
        self.loop.call_later(self.after, function)


class VirtualEngines:
    """Replaces the generator, and the pool that answers single requests. A request is a number of tokens.

    Requests are divided evenly over the engines. All concurrent answers get their tokens at the same rate.
    """

    name = "virtual"

    def __init__(self, count: int, speeds: Speeds, main: VirtualMain) -> None:
        self.version, self._count, self._speeds, self._main = 0, count, speeds, main
        self._requests, self._busy, self._busy_start = 0, 0.0, 0.0
        self._tokens = 0.0
        """Number of tokens of an answer that would have been sampled since the beginning."""
        self._answers: list[tuple[float, int, asyncio.Future[None]]] = []
        """Heap: (value of ``_tokens`` at its last token, number of the request, its end)."""
        self._number, self._paused = 0, False
        self._timer: asyncio.TimerHandle | None = None

    def generate(self, requests: Sequence[int]) -> Iterator[tuple[int, None]]:
        """A wave: all answers begin at once. Each is yielded at its last token."""
        seconds, tokens_done = self._speeds.request, 0
        for count, position in enumerate(sorted(range(len(requests)), key=requests.__getitem__)):
            left = len(requests) - count
            part = (requests[position] - tokens_done) * self._seconds_of_a_token(left)
            self._busy += part * min(1.0, left / self._count)
            seconds, tokens_done = seconds + part, requests[position]
            self._main.after = seconds
            yield position, None
        self._busy += self._speeds.request * min(1.0, len(requests) / self._count)

    async def answer(self, tokens: int) -> None:
        self._pass_time()
        self._requests += 1
        await asyncio.sleep(self._speeds.request)
        self._pass_time()
        self._number += 1
        end = self._main.loop.create_future()
        heapq.heappush(self._answers, (self._tokens + tokens, self._number, end))
        self._set_timer()
        try:
            await end
        finally:
            self._pass_time()
            self._requests -= 1

    async def load(self, version: int) -> None:
        """A weight sync. Sampling pauses in its last part."""
        await asyncio.sleep(max(0.0, self._speeds.sync - self._speeds.pause))
        self._pause(True)
        await asyncio.sleep(min(self._speeds.sync, self._speeds.pause))
        self.version = version
        self._pause(False)

    def busy(self) -> float:
        """Seconds with a request so far, the mean of the engines."""
        self._pass_time()
        return self._busy

    def _seconds_of_a_token(self, answers: int) -> float:
        return self._speeds.token + self._speeds.per_answer * max(1.0, answers / self._count)

    def _pause(self, paused: bool) -> None:
        self._pass_time()
        self._paused = paused
        self._set_timer()

    def _pass_time(self) -> None:
        seconds, self._busy_start = self._main.loop.clock - self._busy_start, self._main.loop.clock
        self._busy += seconds * min(1.0, self._requests / self._count)
        if self._answers and not self._paused:
            self._tokens += seconds / self._seconds_of_a_token(len(self._answers))

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._answers and not self._paused:
            tokens = max(0.0, self._answers[0][0] - self._tokens)
            self._timer = self._main.loop.call_later(tokens * self._seconds_of_a_token(len(self._answers)), self._end)

    def _end(self) -> None:
        self._pass_time()
        # 1e-6 of a token: after rounding, the timer may end just before the last token.
        while self._answers and self._answers[0][0] <= self._tokens + 1e-6:
            end = heapq.heappop(self._answers)[2]
            if not end.done():  # it is done if the run has ended
                end.set_result(None)
        self._set_timer()

    def idle(self) -> None:
        """Part of a pool's interface. Not known here, because :meth:`busy` counts over all steps."""

    def restarted(self) -> Mapping[str, int]:
        """Part of a pool's interface. Nothing is sampled twice here."""
        return {}

    def repair(self) -> None:
        """Part of a pool's interface. No engine dies here."""


class VirtualRollouts(Rollouts):
    """The run's rollouts and requests. It also replaces rollout, template and rewards, which only take time."""

    name = "virtual"

    def __init__(self, speeds: Speeds, engines: VirtualEngines, main: VirtualMain, limit: int | None, pool: bool):
        self._speeds, self.concurrency = speeds, limit
        part: Any = self
        parts = SampleParts(rollout=part, template=part, scorer=part)
        super().__init__(parts, engines, main, pool=engines if pool else None)  # type: ignore[arg-type]

    def encode_answer(self, row: Row) -> list[Any]:
        """Part of the template's interface. An answer of the data takes no time."""
        return []

    async def score(self, group: Group, trained_on: bool = True) -> None:
        await asyncio.sleep(self._speeds.group(group.number).reward)

    async def _sample(self, row: Row, index: tuple[int, int], settings: RolloutSettings, *parts: Any) -> Any:
        sample = self._speeds.group(index[0]).sample(index, settings.answers)
        await asyncio.sleep(sample.opening)
        for number, turn in enumerate(sample.turns):
            await parts[0].generate((*index, number), [turn.tokens])
            await asyncio.sleep(turn.after)
        return [Trajectory(row, [], index)]


@dataclass(frozen=True)
class VirtualAcceptance(Acceptance):
    share: float = 0.0
    """Share of the groups that are rejected."""

    @property
    def refills(self) -> int:
        return ENDLESS

    def accept(self, group: Group, counts: dict[str, float]) -> tuple[Group | None, Outcome]:
        is_rejected = random.Random(f"accept {group.number}").random() < self.share
        return (None, "filtered") if is_rejected else (group, "kept")


@dataclass(frozen=True)
class StepTime:
    """Means over steps."""

    step: float
    """Seconds."""
    generate: float
    """Seconds in which the step waits for its batch."""
    learn: float
    sync: float
    trainer_idle: float
    """Share of the time in which the policy does not learn."""
    engines_idle: float
    """Share of the engines' time without a request."""


def virtual_run(
    speeds: Speeds, section: StreamSection, settings: RolloutSettings, batch_size: int, engines: int, limit: int | None
) -> StepTime:
    """The step time with one ``[stream]`` section.

    Args:
        limit: largest number of concurrent samples.
    """
    main = VirtualMain()
    pool = VirtualEngines(engines, speeds, main)
    acceptance = VirtualAcceptance(share=speeds.rejected)
    options: dict[str, Any] = {"batch_size": batch_size, "total_steps": ENDLESS, "staleness": section.staleness}
    if section.mode == "continuous":
        options |= {"order": section.order, "oversample": section.oversample}
    else:
        options["round"] = section.round
    rollouts = VirtualRollouts(speeds, pool, main, limit, section.mode == "continuous")
    rows = SimpleNamespace(take=lambda n, step=0: [Row({}, "", 0)] * n, curriculum=None)
    make: Any = ContinuousStream if section.mode == "continuous" else WaveStream
    stream: Stream = make(rows, rollouts, settings, acceptance=acceptance, **options)
    learn = speeds.learn(batch_size * settings.samples)
    # The first steps only fill the stream. Then whole rounds are measured, because the steps of a round differ.
    fill = section.round * (2 + section.staleness)
    count = section.round * -(-speeds.steps_to_plan(batch_size * settings.samples) // section.round)
    start = generate = sync = busy = 0.0
    asyncio.set_event_loop(main.loop)
    try:
        for step in range(fill + count):
            if step == fill:
                start, generate, sync, busy = main.loop.clock, 0.0, 0.0, pool.busy()
            begin = main.loop.clock
            stream.start(step)
            stream.take(step)
            generate += main.loop.clock - begin
            main.run(asyncio.sleep(learn))
            begin = main.loop.clock
            if stream.samples_with(step + 1):
                main.run(pool.load(step + 1))
            sync += main.loop.clock - begin
            main.run(asyncio.sleep(speeds.other))
        seconds, busy = main.loop.clock - start, pool.busy() - busy
        stream.close()
    finally:
        asyncio.set_event_loop(None)
        main.loop.close()
    return StepTime(
        step=seconds / count,
        generate=generate / count,
        learn=learn,
        sync=sync / count,
        trainer_idle=max(0.0, 1 - learn * count / seconds),
        engines_idle=max(0.0, 1 - busy / seconds),
    )
