"""The threads in which coroutines of plugins wait for what blocks: ``asyncio.to_thread``, name look-ups."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

LIMIT = 64
"""Calls under way at once. They wait more than they compute, so this does not depend on the processors."""


class Threads(ThreadPoolExecutor):
    """As Python's own, which asyncio asks for, but its threads keep no process from ending: a call whose deadline has
    passed cannot be interrupted, and one that never returns would be waited for at the end of the run, for good."""

    def __init__(self, limit: int = LIMIT) -> None:
        super().__init__(limit)
        self._limit, self._busy = limit, 0
        self._guard = threading.Lock()
        self._later: deque[tuple[Future[Any], Callable[[], Any]]] = deque()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Run it now, or as soon as fewer than the limit are under way."""
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
        """What has not begun does not begin any more; nothing is waited for."""
        with self._guard:
            left, self._later = self._later, deque()
        for future, _ in left:
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
