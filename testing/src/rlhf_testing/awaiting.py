"""Calls plugin methods, which may be ``async def`` or plain ``def``, with a time limit.

All calls run on one event loop, as in a run. A plugin may keep a connection from one call to the next.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import inspect
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from rlhf_testing.contract import Nonconformance

GRACE = 1.0
"""Seconds by which a coroutine may exceed its limit before it is interrupted like a plain method. A coroutine that
awaits something is cancelled at the limit itself; one that blocks the event loop is not."""

_TOO_SLOW: set[tuple[Any, float]] = set()
"""(function, limit) of the calls that took too long. Later checks of a suite do not wait for them again."""

_RUNNER = asyncio.Runner()
atexit.register(_RUNNER.close)


class Interrupted(BaseException):
    """Raised inside a method that has exceeded its limit. It is not an Exception, so that the method does not catch
    it."""


def call(method: Callable[..., Any], *arguments: Any, limit: float = 30.0) -> Any:
    """The result of ``method(*arguments)``, awaited if it is an awaitable.

    Raises Nonconformance if this call, or an earlier one, takes longer than ``limit`` seconds. A signal interrupts
    plain methods and coroutines that block. It works in the main thread only, and not inside a call into C code that
    does not return."""

    async def run() -> Any:
        try:
            result = method(*arguments)
            return await result if inspect.isawaitable(result) else result
        except SystemExit as error:  # the event loop would raise it again in the next call
            raise Nonconformance(f"{name} calls sys.exit(): raise an exception that says what is wrong") from error

    async def limited() -> Any:
        return await asyncio.wait_for(run(), limit)

    name, key = getattr(method, "__qualname__", str(method)), (getattr(method, "__func__", method), limit)
    too_slow = Nonconformance(
        f"{name} took longer than {limit:g} s on fabricated data. A run stops a call at its deadline, and the sample "
        "fails"
    )
    if key in _TOO_SLOW:
        raise too_slow
    begin = time.monotonic()
    try:
        with _interrupted_after(limit + GRACE):
            return _RUNNER.run(limited())
    except (TimeoutError, Interrupted) as error:
        if time.monotonic() - begin < limit:  # the method's own TimeoutError
            raise
        _TOO_SLOW.add(key)
        raise too_slow from error


@contextlib.contextmanager
def _interrupted_after(seconds: float) -> Iterator[None]:
    """Raises :class:`Interrupted` in the main thread after ``seconds``. Other threads, and systems without the signal,
    are not interrupted. A timer that was already set (by a test runner) is restored afterwards."""
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield
        return

    def interrupt(*_: object) -> None:
        raise Interrupted

    handler = signal.signal(signal.SIGALRM, interrupt)
    begin = time.monotonic()
    left, every = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        if left:
            signal.setitimer(signal.ITIMER_REAL, max(0.001, left - (time.monotonic() - begin)), every)
