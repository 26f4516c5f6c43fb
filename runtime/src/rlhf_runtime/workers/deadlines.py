"""Calls into plugin code: within a deadline, and with what went wrong said in one line."""

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

OURS = tuple(str(Path(file).parent) for file in (rlhf.errors.__file__, Path(__file__).parent))
"""Folders of the contract and of the runtime: a plugin's error that arises there was still made by the plugin."""

GRACE = 1.0
"""Seconds a cancelled coroutine gets to clean up before it is left behind."""


class Clock:
    """What of a call does not count towards its deadline: the time in which it waits for a model of this run, which may
    be busy with others for as long as they like. Used from the event loop only."""

    def __init__(self) -> None:
        self._waits, self._since, self._sum = 0, 0.0, 0.0

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Waits may overlap: what the call asks for at once is waited for once."""
        if self._waits == 0:
            self._since = asyncio.get_running_loop().time()
        self._waits += 1
        try:
            yield
        finally:
            self._waits -= 1
            if self._waits == 0:
                self._sum += asyncio.get_running_loop().time() - self._since

    def waited(self) -> float:
        """Seconds so far."""
        return self._sum + (asyncio.get_running_loop().time() - self._since if self._waits else 0.0)


_CLOCK: ContextVar[Clock | None] = ContextVar("clock", default=None)


def waiting() -> AbstractContextManager[None]:
    """Entered by what a plugin calls while it waits for this run: the deadline of the plugin's call stands still."""
    clock = _CLOCK.get()
    return clock.stopped() if clock is not None else nullcontext()


class DeadlineExpired(Exception):
    """A call took longer than it may; the caller turns it into an error that names the plugin."""


async def within(awaitable: Awaitable[T], seconds: float) -> T:
    """What ``awaitable`` returns, or :class:`DeadlineExpired` after ``seconds``, :func:`waiting` left out.

    The awaitable is cancelled at its deadline. One that swallows the cancellation is abandoned after
    :data:`GRACE` seconds instead of waited for. Code that blocks the event loop (``time.sleep``, a long
    computation) cannot be interrupted here: write it as plain ``def``.
    """
    clock, loop = Clock(), asyncio.get_running_loop()
    before = _CLOCK.set(clock)
    try:
        task = asyncio.ensure_future(awaitable)  # takes the clock along
    finally:
        _CLOCK.reset(before)
    begin, left = loop.time(), seconds
    done: set[asyncio.Future[T]] = set()
    try:
        while not done and left > 0:
            done, _ = await asyncio.wait({task}, timeout=left)
            left = seconds - (loop.time() - begin - clock.waited())
    except asyncio.CancelledError:
        task.cancel()
        await asyncio.wait({task}, timeout=GRACE)
        task.add_done_callback(_retrieve)
        raise
    if not done:
        task.cancel()
        await asyncio.wait({task}, timeout=GRACE)
        task.add_done_callback(_retrieve)
        raise DeadlineExpired
    if task.cancelled():
        raise RuntimeError("the coroutine was cancelled from within")
    return task.result()


def cause(error: BaseException) -> str:
    """``ValueError: bad value (reward.py:12)``: the type, the message and the innermost line outside of :data:`OURS`,
    which is where the author of the plugin looks. Errors of this project name their place themselves."""
    if isinstance(error, RlhfError):
        return f"{type(error).__name__}: {error}"
    frames = list(traceback.extract_tb(error.__traceback__))
    frames = [f for f in frames if not f.filename.startswith(OURS)] or frames
    place = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}{place}"


def _retrieve(task: asyncio.Future[Any]) -> None:
    """Mark an abandoned task's exception as seen; its failure was reported as an expired deadline."""
    if not task.cancelled():
        task.exception()
