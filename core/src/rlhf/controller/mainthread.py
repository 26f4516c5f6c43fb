"""Two threads: coroutines of rollouts, rewards and environments run beside; everything that computes with the models
runs on the main thread, one job at a time, so its results do not depend on timing."""

from __future__ import annotations

import asyncio
import queue
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

T = TypeVar("T")

STANDSTILL = 30.0
"""Seconds without a turn of the event loop, while the main thread has nothing to do, after which that is said."""


class MainThread:
    """``run(coroutine)`` blocks the main thread, serving the jobs that coroutines hand it through :meth:`call`."""

    def __init__(self, standstill: float = STANDSTILL) -> None:
        self._standstill = standstill
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="rlhf-rollouts", daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run ``coroutine`` on the event loop until it ends, doing its model work here meanwhile."""
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
        """From a coroutine: run ``function`` on the main thread and wait for what it returns."""
        done: asyncio.Future[T] = asyncio.get_running_loop().create_future()

        def job() -> None:
            try:
                settle = partial(done.set_result, function())
            except Exception as error:
                settle = partial(done.set_exception, error)
            self._finish(done, settle)

        self._jobs.put(job)
        return await done

    def from_main(self, function: Callable[[], None]) -> None:
        """From a job: run ``function`` on the event loop soon."""
        self.loop.call_soon_threadsafe(function)

    def close(self) -> None:
        """Stop the event loop and its thread."""
        if self.loop.is_running():
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join(timeout=10)
        if not self.loop.is_running() and not self.loop.is_closed():
            self.loop.close()

    def _next_job(self) -> Callable[[], None] | None:
        """Wait for a job. Where the event loop itself stands still meanwhile, no deadline can end that: say where."""
        said, beat = False, threading.Event()
        self.loop.call_soon_threadsafe(beat.set)
        since = time.monotonic()
        while True:
            try:
                return self._jobs.get(timeout=self._standstill)
            except queue.Empty:
                if beat.is_set():
                    beat.clear()
                    self.loop.call_soon_threadsafe(beat.set)
                    since = time.monotonic()
                elif not said:
                    said = True
                    print(_standing_still(self._thread, time.monotonic() - since), file=sys.stderr, flush=True)  # noqa: T201

    def _finish(self, done: asyncio.Future[T], settle: Callable[[], None]) -> None:
        def settle_if_waiting() -> None:
            if not done.done():  # its coroutine may have been cancelled
                settle()

        self.loop.call_soon_threadsafe(settle_if_waiting)


def _standing_still(thread: threading.Thread, seconds: float) -> str:
    """Which line keeps the event loop, outside of Python's own library where there is one, and what to do."""
    library, place = sysconfig.get_path("stdlib"), "an unknown place"
    frame = sys._current_frames().get(thread.ident or 0)
    while frame is not None and (frame.f_code.co_filename.startswith(library) or "<" in frame.f_code.co_filename):
        frame = frame.f_back
    if frame is not None:
        place = f"{frame.f_code.co_name}() at {frame.f_code.co_filename}:{frame.f_lineno}"
    return (
        f"note: all rollouts, rewards and environments have waited {seconds:.0f} s for {place}, an `async def` that "
        "computes or waits without `await`. No deadline can end it. Write it as plain `def`, which runs in a process "
        "of its own that is killed at its deadline. Ctrl-C twice ends the run."
    )
