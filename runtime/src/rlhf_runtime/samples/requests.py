"""How samples get turns from the generator: in waves, or each request immediately."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from rlhf.errors import RlhfError, WorkerError
from rlhf.interfaces import EnginePool, Generator
from rlhf.types import GenerationRequest, Turn

from rlhf_runtime.calls.deadlines import cause
from rlhf_runtime.calls.main_thread import MainThread


@dataclass(slots=True)
class _Waiting:
    order: tuple[int, ...]
    request: GenerationRequest
    future: asyncio.Future[Turn] = field(compare=False)


class Waves:
    """Requests in waves. A wave starts when every live sample waits for tokens. It contains all waiting requests, in
    index order. So the composition of every generated batch depends only on counters, never on timing: the same seed
    gives the same run.

    Used from the event loop only. Each sample awaits :meth:`enter` once, awaits :meth:`generate` any number of times,
    and calls :meth:`leave` once.

    Args:
        samples: indices of all samples that will enter. They are admitted in this order.
        limit: largest number of live samples (an environment's concurrency). When a sample leaves, the next is
            admitted.
    """

    def __init__(
        self, generator: Generator, main: MainThread, samples: Sequence[tuple[int, ...]], limit: int | None = None
    ) -> None:
        self._generator, self._main = generator, main
        self._turnstile = {order: asyncio.Event() for order in samples}
        self._queue = deque(samples)
        self._busy = 0
        """Number of live samples that do not wait for tokens."""
        self._waiting: list[_Waiting] = []
        self._waiting_samples = 0
        """Number of live samples that wait for tokens, each with one or several requests."""
        self._tasks: set[asyncio.Task[None]] = set()
        for _ in range(len(samples) if limit is None else min(limit, len(samples))):
            self._admit_next()

    async def enter(self, order: tuple[int, ...]) -> None:
        """Wait until the sample is admitted."""
        await self._turnstile[order].wait()

    def leave(self) -> None:
        """Report that an admitted sample has ended, successfully or not."""
        self._busy -= 1
        if self._queue:
            self._admit_next()
        self._start_if_all_wait()

    def _admit_next(self) -> None:
        self._turnstile[self._queue.popleft()].set()
        self._busy += 1

    async def generate(self, order: tuple[int, ...], requests: Sequence[GenerationRequest]) -> list[Turn]:
        """The sampled turns of one sample. Generation starts when all other live samples wait too."""
        loop = asyncio.get_running_loop()
        waiting = [_Waiting((*order, n), request, loop.create_future()) for n, request in enumerate(requests)]
        self._waiting += waiting
        self._busy -= 1
        self._waiting_samples += 1
        self._start_if_all_wait()
        return await asyncio.gather(*(w.future for w in waiting))

    async def settled(self) -> None:
        """Wait until no wave is running. A wave can end after all of its samples have ended or failed."""
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _start_if_all_wait(self) -> None:
        if self._busy or not self._waiting:
            return
        wave = sorted(self._waiting, key=lambda w: w.order)
        self._waiting = []
        # All of them count as busy from now on, so the next wave waits until each has asked again or ended.
        self._busy, self._waiting_samples = self._waiting_samples, 0
        task = asyncio.get_running_loop().create_task(self._run(wave))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, wave: list[_Waiting]) -> None:
        """Pass each turn to its sample as soon as the turn is complete, while the rest of the wave continues."""

        def hand_over(waiting: _Waiting, turn: Turn) -> None:
            # The sample may have been cancelled.
            if not waiting.future.done():
                waiting.future.set_result(turn)

        def job() -> None:
            for position, turn in self._generator.generate([w.request for w in wave]):
                self._main.from_main(lambda w=wave[position], t=turn: hand_over(w, t))  # type: ignore[misc]

        # An error ends only the requests that have no answer yet. Samples that have theirs continue.
        broken: Exception | None = None
        try:
            await self._main.call(job)
        except RlhfError as error:
            broken = error
        except Exception as error:  # raised by the generator itself, not by a sample, rollout or environment
            broken = WorkerError(f"generator {self._generator.name!r} raised {cause(error)}")
            broken.__cause__ = error
        unanswered = [waiting for waiting in wave if not waiting.future.done()]
        if unanswered and broken is None:
            broken = WorkerError(
                f"generator {self._generator.name!r} was asked for {len(wave)} turns but returned "
                f"{len(wave) - len(unanswered)}; it must return one for each request"
            )
        for waiting in unanswered:
            assert broken is not None
            waiting.future.set_exception(broken)


class Places:
    """Limits the live samples of a continuous stream and of the evaluations beside it. When a place is free, samples of
    an evaluation take it first. Used from the event loop only."""

    def __init__(self, places: int) -> None:
        self._free = places
        self._waiting: tuple[deque[asyncio.Future[None]], deque[asyncio.Future[None]]] = deque(), deque()
        """Samples of evaluations, and other samples."""

    async def take(self, evaluates: bool) -> None:
        """Wait until a place is free.

        Args:
            evaluates: whether the place is for a sample of an evaluation.
        """
        if self._free:
            self._free -= 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[not evaluates].append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # cancelled just after it got a place
                self.give_back()
            raise

    def give_back(self) -> None:
        """A place is free again."""
        for queue in self._waiting:
            while queue:
                turn = queue.popleft()
                if not turn.done():
                    turn.set_result(None)
                    return
        self._free += 1


class SingleRequests:
    """Sends each request by itself. It does not wait for other samples. Used from the event loop only, by the same
    three calls as :class:`Waves`.

    Args:
        places: limit of live samples (an environment's concurrency); None: no limit.
        evaluates: whether the samples are of an evaluation.
    """

    def __init__(self, pool: EnginePool, places: Places | None = None, evaluates: bool = False) -> None:
        self._pool, self._places, self._evaluates = pool, places, evaluates
        self._live = 0
        """Number of live samples."""
        self._open, self._quiet = asyncio.Event(), asyncio.Event()
        self._open.set()
        self._quiet.set()

    async def enter(self, order: tuple[int, ...]) -> None:
        """Wait until a place is free."""
        while True:
            await self._open.wait()
            if self._places is not None:
                await self._places.take(self._evaluates)
            if self._open.is_set():
                break
            if self._places is not None:  # held meanwhile
                self._places.give_back()
        self._live += 1
        self._quiet.clear()

    def leave(self) -> None:
        """A sample has ended."""
        if self._places is not None:
            self._places.give_back()
        self._live -= 1
        if not self._live:
            self._quiet.set()

    async def generate(self, order: tuple[int, ...], requests: Sequence[GenerationRequest]) -> list[Turn]:
        """The sampled turns of one sample. If a request fails, the others are cancelled, because nobody reads them."""
        tasks = [asyncio.ensure_future(self._answer(request)) for request in requests]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _answer(self, request: GenerationRequest) -> Turn:
        try:
            return await self._pool.answer(request)
        except RlhfError:
            raise
        except Exception as error:  # raised by the generator itself, not by a sample, rollout or environment
            raise WorkerError(f"generator {self._pool.name!r} raised {cause(error)}") from error

    def hold(self) -> asyncio.Event:
        """Let no further sample enter before :meth:`release`. Returns an event that is set once no sample is live.

        Live samples are completed: a sample that waited for its next turn would keep its place, which an evaluation
        may need.
        """
        self._open.clear()
        return self._quiet

    def release(self) -> None:
        """Let samples enter again."""
        self._open.set()

    async def settled(self) -> None:
        """Returns at once, because no request is open once every sample has left."""


Requests = Waves | SingleRequests
"""How samples get their turns."""
