"""Calls plugin methods, which may be ``async def`` or plain ``def``, with a time limit.

All calls run on one event loop, as in a run. A plugin may keep a connection from one call to the next.
"""

from __future__ import annotations

import asyncio
import atexit
import inspect
from collections.abc import Callable
from typing import Any

from rlhf_testing.contract import Nonconformance

_RUNNER = asyncio.Runner()
atexit.register(_RUNNER.close)


def call(method: Callable[..., Any], *arguments: Any, limit: float = 30.0) -> Any:
    """``method(*arguments)``, awaited where it returns an awaitable.

    Raises Nonconformance where an ``async`` method takes longer than ``limit`` seconds. A plain method cannot be
    stopped from inside this process; the runtime runs plain methods in a worker process that it can kill."""

    async def run() -> Any:
        result = method(*arguments)
        return await result if inspect.isawaitable(result) else result

    async def limited() -> Any:
        return await asyncio.wait_for(run(), limit)

    try:
        return _RUNNER.run(limited())
    except TimeoutError as error:
        name = getattr(method, "__qualname__", str(method))
        raise Nonconformance(f"{name} took longer than {limit} s on fabricated data") from error
