"""Calls plugin methods, which may be ``async def`` or plain ``def``, with a time limit."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from typing import Any

from rlhf_testing.contract import Nonconformance


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
        return asyncio.run(limited())
    except TimeoutError as error:
        name = getattr(method, "__qualname__", str(method))
        raise Nonconformance(f"{name} took longer than {limit} s on fabricated data") from error
