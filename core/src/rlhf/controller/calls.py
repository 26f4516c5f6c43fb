"""Calls into plugin code: within a deadline, and with what went wrong said in one line."""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Awaitable
from typing import Any, TypeVar

from rlhf.errors import RlhfError

T = TypeVar("T")

GRACE = 1.0
"""Seconds a cancelled coroutine gets to clean up before it is left behind."""


class DeadlineExpired(Exception):
    """A call took longer than it may; the caller turns it into an error that names the plugin."""


async def within(awaitable: Awaitable[T], seconds: float) -> T:
    """What ``awaitable`` returns, or :class:`DeadlineExpired` after ``seconds``.

    The awaitable is cancelled at its deadline. One that swallows the cancellation is abandoned after
    :data:`GRACE` seconds instead of waited for, so a caller never waits longer than ``seconds + GRACE``. Code that
    blocks the event loop (``time.sleep``, a long computation) cannot be interrupted here: write it as plain ``def``.
    """
    task = asyncio.ensure_future(awaitable)
    try:
        done, _ = await asyncio.wait({task}, timeout=seconds)
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
    """``ValueError: bad value (reward.py:12)``: the type, the message and the innermost place. Errors of this project
    say enough by themselves."""
    if isinstance(error, RlhfError):
        return f"{type(error).__name__}: {error}"
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}{place}"


def _retrieve(task: asyncio.Future[Any]) -> None:
    """Mark an abandoned task's exception as seen; its failure was reported as an expired deadline."""
    if not task.cancelled():
        task.exception()
