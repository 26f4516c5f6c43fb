"""Two threads: coroutines of rollouts, rewards and environments run beside; everything that computes with the models
runs on the main thread, one job at a time, so its results do not depend on timing."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

T = TypeVar("T")


class MainThread:
    """``run(coroutine)`` blocks the main thread, serving the jobs that coroutines hand it through :meth:`call`."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="rlhf-rollouts", daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run ``coroutine`` on the event loop until it ends, doing its model work here meanwhile."""
        future: Future[T] = asyncio.run_coroutine_threadsafe(coroutine, self.loop)
        future.add_done_callback(lambda _: self._jobs.put(None))
        try:
            while (job := self._jobs.get()) is not None:
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

    def _finish(self, done: asyncio.Future[T], settle: Callable[[], None]) -> None:
        def settle_if_waiting() -> None:
            if not done.done():  # its coroutine may have been cancelled
                settle()

        self.loop.call_soon_threadsafe(settle_if_waiting)
