"""Deadlines for calls into plugin code, and one-line descriptions of plugins' errors."""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Awaitable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from pathlib import Path
from typing import Any, TypeVar

import rlhf.errors
from rlhf.errors import RlhfError

T = TypeVar("T")

RLHF_FOLDERS = tuple(str(Path(file).parent) for file in (rlhf.errors.__file__, Path(__file__).parent))
"""Folders of the core and of the code that calls plugins. An error raised in these folders during a call into a plugin
is the plugin's error, so their frames are not shown."""

GRACE = 1.0
"""Seconds that a cancelled coroutine has to clean up before it is abandoned."""


class Clock:
    """The deadline of a call, which can be stopped while the call waits for a model of this run: the model may be busy
    with other work. Used from the event loop only."""

    def __init__(self, seconds: float) -> None:
        self.timeout = asyncio.timeout(seconds)
        """The context of the call."""
        self.is_over = False
        """Whether the call has ended. Tasks that it started may still run."""
        self._waits, self._remaining = 0, seconds

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """A context whose time does not count. Such contexts may overlap."""
        loop = asyncio.get_running_loop()
        if (end := self.timeout.when()) is not None:
            self.timeout.reschedule(None)
            self._remaining = end - loop.time()
        self._waits += 1
        try:
            yield
        finally:
            self._waits -= 1
            if not self._waits and not self.is_over:
                self.timeout.reschedule(loop.time() + self._remaining)


_CLOCK: ContextVar[Clock | None] = ContextVar("clock", default=None)


def waiting() -> AbstractContextManager[None]:
    """A context for functions that a plugin calls, entered while they wait for a model of this run. Time spent inside
    does not count towards the deadline of the plugin's call."""
    clock = _CLOCK.get()
    return nullcontext() if clock is None or clock.is_over else clock.stopped()


class DeadlineExpired(Exception):
    """A call exceeded its deadline. The caller turns this into an error that names the plugin."""


class ProcessEnd(Exception):
    """A coroutine raised SystemExit, KeyboardInterrupt or another exception that is not a subclass of Exception. It is
    the cause of this error. A task that raised it directly would stop the event loop, and with it the run."""


async def with_deadline(awaitable: Awaitable[T], seconds: float) -> T:
    """Returns the result of ``awaitable``. Raises :class:`DeadlineExpired` after ``seconds``, not counting the time in
    :func:`waiting`.

    The awaitable is cancelled at its deadline. If it ignores the cancellation, it is abandoned after :data:`GRACE`
    seconds. Code that blocks the event loop (``time.sleep``, a long computation) cannot be interrupted here: write it
    as plain ``def``.
    """
    clock = Clock(seconds)
    clock_token = _CLOCK.set(clock)
    try:
        task = asyncio.ensure_future(_errors_only(awaitable))  # the task copies the context, and with it the clock
    finally:
        _CLOCK.reset(clock_token)
    try:
        async with clock.timeout:
            await asyncio.wait({task})
    except (asyncio.CancelledError, TimeoutError) as error:
        clock.is_over = True
        # A task that ended while the loop was blocked, by itself or by another call, has its result.
        if isinstance(error, asyncio.CancelledError) or not task.done():
            task.cancel()
            await asyncio.wait({task}, timeout=GRACE)
            task.add_done_callback(_retrieve)
            if isinstance(error, TimeoutError):
                raise DeadlineExpired from None
            raise
    clock.is_over = True
    if task.cancelled():
        raise RuntimeError("the coroutine was cancelled from within")
    return task.result()


def cause(error: BaseException) -> str:
    """``ValueError: bad value (reward.py:12)``: the type, the message and the innermost line outside
    :data:`RLHF_FOLDERS`, which is in the plugin's code. Errors of this project already name their place."""
    if isinstance(error, ProcessEnd) and error.__cause__ is not None:
        error = error.__cause__
    if isinstance(error, RlhfError):
        return f"{type(error).__name__}: {error}"
    frames = list(traceback.extract_tb(error.__traceback__))
    frames = [f for f in frames if not f.filename.startswith(RLHF_FOLDERS)] or frames
    place = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}{place}"


async def _errors_only(awaitable: Awaitable[T]) -> T:
    try:
        return await awaitable
    except (asyncio.CancelledError, Exception):
        raise
    except BaseException as error:
        raise ProcessEnd(f"{type(error).__name__}: {error}") from error


def _retrieve(task: asyncio.Future[Any]) -> None:
    """Mark an abandoned task's exception as seen; its failure was reported as an expired deadline."""
    if not task.cancelled():
        task.exception()
