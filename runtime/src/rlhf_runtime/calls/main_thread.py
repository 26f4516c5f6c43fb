"""Two threads. One runs the event loop with the coroutines of rollouts, rewards and environments. The main thread runs
all computation with the models, one job at a time, so that results do not depend on timing."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from rlhf.errors import StandstillError
from rlhf.plugins.importing import place

if TYPE_CHECKING:
    from rlhf_runtime.loop.signals import StopRequest

T = TypeVar("T")

STANDSTILL = 30.0
"""The event loop is reported as blocked after this many seconds without a turn while the main thread has no job."""
GRACE = 10.0
"""A run that was asked to stop fails after this many seconds without a turn of the event loop. Schedulers kill a job 30
s after they ask it to stop, so the run must end within that time."""
LOOK = 0.5
"""Seconds between two checks of the event loop."""


class MainThread:
    """``run(coroutine)`` blocks the main thread and runs the jobs that coroutines submit with :meth:`call`.

    Args:
        stop: returns whether the run was asked to stop; None: the run cannot be asked to stop.
        standstill: seconds, see :data:`STANDSTILL`.
        grace: seconds, see :data:`GRACE`.
    """

    def __init__(self, stop: StopRequest | None = None, standstill: float = STANDSTILL, grace: float = GRACE) -> None:
        self.stop, self._standstill, self._grace = stop, standstill, grace
        self._stuck = False
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self.loop = Loop()
        self.loop.set_default_executor(Threads())
        self._thread = threading.Thread(target=self._serve, name="rlhf-rollouts", daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run ``coroutine`` on the event loop until it ends. Its jobs run on the calling thread.

        Raises StandstillError if the run was asked to stop and a coroutine blocks the event loop.
        """
        future: Future[T] = asyncio.run_coroutine_threadsafe(coroutine, self.loop)
        future.add_done_callback(lambda _: self._jobs.put(None))
        try:
            while (job := self._next_job()) is not None:
                job()
        except BaseException:
            future.cancel()
            raise
        return future.result()

    async def call(self, function: Callable[[], T]) -> T:
        """Called from a coroutine. Runs ``function`` on the main thread and waits for its result."""
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()

        def job() -> None:
            try:
                settle = partial(future.set_result, function())
            except Exception as error:
                settle = partial(future.set_exception, error)

            def settle_if_waiting() -> None:
                if not future.done():  # its coroutine may have been cancelled
                    settle()

            self.from_main(settle_if_waiting)

        self._jobs.put(job)
        return await future

    def from_main(self, function: Callable[[], None]) -> None:
        """Called from a job. Schedules ``function`` on the event loop."""
        self.loop.call_soon_threadsafe(function)

    def close(self) -> None:
        """Stop the event loop and its thread, and end the processes that were started there."""
        if not self.loop.is_closed():
            asyncio.run_coroutine_threadsafe(self.loop.end(), self.loop)
            self._thread.join(timeout=0 if self._stuck else 10)

    def _serve(self) -> None:
        """Run the event loop until it is stopped, and close it in this thread, because nobody waits for a blocked loop.

        A task that raises SystemExit or KeyboardInterrupt leaves the loop. Code that awaits the task gets the error
        too, and all other coroutines continue."""
        while True:
            try:
                self.loop.run_forever()
                return self.loop.close()
            except (SystemExit, KeyboardInterrupt):
                continue

    def _next_job(self) -> Callable[[], None] | None:
        """Wait for a job. No deadline can end a coroutine that blocks the event loop: this method reports where it
        blocks, and raises StandstillError if the run was asked to stop."""
        # The event loop sets `beat` in its next turn. As long as it is not set, a coroutine blocks the loop.
        is_reported, beat = False, threading.Event()
        self.loop.call_soon_threadsafe(beat.set)
        turned = time.monotonic()
        stop_time: float | None = None
        while True:
            try:
                return self._jobs.get(timeout=min(LOOK, self._standstill, self._grace))
            except queue.Empty:
                time_s = time.monotonic()
            if beat.is_set():
                beat.clear()
                self.loop.call_soon_threadsafe(beat.set)
                turned = time_s
            elif not is_reported and time_s - turned >= self._standstill:
                is_reported = True
                print(_standing_still(self._thread, time_s - turned), file=sys.stderr, flush=True)  # noqa: T201
            if self.stop is not None and self.stop.requested:
                stop_time = time_s if stop_time is None else stop_time
                # A block counts from the request on. Every turn of the loop starts the time anew.
                if time_s - max(stop_time, turned) >= self._grace:
                    self._stuck = True
                    raise StandstillError(_in_the_way(self._thread, self.stop.reason, time_s - turned))


def _standing_still(thread: threading.Thread, seconds: float) -> str:
    """The message that names the line which blocks the event loop."""
    return (
        f"note: all rollouts, rewards and environments have waited {seconds:.0f} s for {place(thread.ident)}, an "
        "`async def` that computes or waits without `await`. No deadline can end it. Write it as plain `def`: it then "
        "runs in its own process, which is killed at its deadline. Press Ctrl-C twice to end the run."
    )


def _in_the_way(thread: threading.Thread, reason: str, seconds: float) -> str:
    return (
        f"{reason} asked the run to stop, but {place(thread.ident)} has blocked all rollouts, rewards and environments "
        f"for {seconds:.0f} s: it is an `async def` that computes or waits without `await`. The current step is "
        "abandoned. Write it as plain `def`: it then runs in its own process, which is killed at its deadline."
    )


ENDING = 2.0
"""Maximum seconds to wait for killed processes to end, and again for cancelled tasks."""


class Loop(asyncio.SelectorEventLoop):
    """Records the processes that coroutines start through asyncio. A coroutine that is cancelled at its deadline leaves
    its process running; without this record the process would outlive the run."""

    def __init__(self) -> None:
        super().__init__()
        self._started: weakref.WeakSet[asyncio.SubprocessTransport] = weakref.WeakSet()

    async def subprocess_exec(self, *arguments: Any, **options: Any) -> Any:
        transport, protocol = await super().subprocess_exec(*arguments, **options)
        self._started.add(transport)
        return transport, protocol

    async def subprocess_shell(self, *arguments: Any, **options: Any) -> Any:
        transport, protocol = await super().subprocess_shell(*arguments, **options)
        self._started.add(transport)
        return transport, protocol

    async def end(self) -> None:
        """Ask running processes to end, kill those that do not end, cancel the remaining tasks (such as connections
        that a plugin holds for the whole run), and stop the loop. Each part waits up to :data:`ENDING` seconds."""
        # a supervisor that is asked to end also ends all descendants of its process; a killed one cannot
        for method in ("terminate", "kill"):
            for transport in list(self._started):
                if transport.get_returncode() is None:
                    with contextlib.suppress(ProcessLookupError):
                        getattr(transport, method)()
            last = self.time() + ENDING
            while any(transport.get_returncode() is None for transport in self._started) and self.time() < last:
                await asyncio.sleep(0.01)
        tasks = asyncio.all_tasks(self) - {asyncio.current_task(self)}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=ENDING)
        self.stop()


CALLS = 64
"""Maximum concurrent blocking calls of coroutines (``asyncio.to_thread``, name look-ups). They mostly wait, so the
limit does not depend on the number of CPUs."""


class Threads(ThreadPoolExecutor):
    """A ThreadPoolExecutor (the type that asyncio requires) with daemon threads, which do not keep the process alive.
    A blocking call cannot be interrupted at its deadline. With Python's own pool, a call that never returns would keep
    the process from ending."""

    def __init__(self, limit: int = CALLS) -> None:
        super().__init__(limit)
        self._limit, self._busy = limit, 0
        self._guard = threading.Lock()
        self._queue: deque[tuple[Future[Any], Callable[[], Any]]] = deque()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Run ``fn`` now, or as soon as the number of running calls is below the limit."""
        future: Future[Any] = Future()
        call = (future, partial(fn, *args, **kwargs))
        with self._guard:
            starts = self._busy < self._limit
            self._busy += starts
            if not starts:
                self._queue.append(call)
        if starts:
            threading.Thread(target=self._work, args=call, name="rlhf-waiting", daemon=True).start()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Cancel the calls that have not begun. Does not wait for the others."""
        with self._guard:
            pending, self._queue = self._queue, deque()
        for future, _ in pending:
            future.cancel()

    def _work(self, future: Future[Any], function: Callable[[], Any]) -> None:
        while True:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(function())
                except BaseException as error:
                    future.set_exception(error)
            with self._guard:
                if not self._queue:
                    self._busy -= 1
                    return
                future, function = self._queue.popleft()
