"""Threads for blocking calls of plugins' coroutines: ``asyncio.to_thread``, name look-ups."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

LIMIT = 64
"""Maximum concurrent calls. They wait more than they compute, so the limit does not depend on the number of CPUs."""


class Threads(ThreadPoolExecutor):
    """A ThreadPoolExecutor (the type that asyncio requires) with daemon threads, which do not keep the process alive.
    A blocking call cannot be interrupted at its deadline. With Python's own pool, a call that never returns would keep
    the process from ending."""

    def __init__(self, limit: int = LIMIT) -> None:
        super().__init__(limit)
        self._limit, self._busy = limit, 0
        self._guard = threading.Lock()
        self._later: deque[tuple[Future[Any], Callable[[], Any]]] = deque()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Run ``fn`` now, or as soon as fewer calls than the limit are running."""
        future: Future[Any] = Future()
        call = (future, partial(fn, *args, **kwargs))
        with self._guard:
            starts = self._busy < self._limit
            self._busy += starts
            if not starts:
                self._later.append(call)
        if starts:
            threading.Thread(target=self._work, args=call, name="rlhf-waiting", daemon=True).start()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Cancel the calls that have not begun. Does not wait for the others."""
        with self._guard:
            pending, self._later = self._later, deque()
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
                if not self._later:
                    self._busy -= 1
                    return
                future, function = self._later.popleft()
