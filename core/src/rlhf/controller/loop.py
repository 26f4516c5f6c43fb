"""The event loop of rollouts, rewards and environments, which ends what its coroutines have started."""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from typing import Any


class Loop(asyncio.SelectorEventLoop):
    """Knows the processes that coroutines started through asyncio. A coroutine that is cancelled at its deadline leaves
    its process running, which would still run after the end of the run."""

    def __init__(self) -> None:
        super().__init__()
        self._started: weakref.WeakSet[asyncio.SubprocessTransport] = weakref.WeakSet()

    async def subprocess_exec(self, *arguments: Any, **options: Any) -> Any:
        transport, protocol = await super().subprocess_exec(*arguments, **options)
        self._started.add(transport)
        return transport, protocol

    async def subprocess_shell(self, *arguments: Any, **options: Any) -> Any:
        transport, protocol = await super().subprocess_shell(*arguments, **options)
        self._started.add(transport)
        return transport, protocol

    def kill_started(self) -> None:
        """End those that still run."""
        for transport in list(self._started):
            if transport.get_returncode() is None:
                with contextlib.suppress(ProcessLookupError):
                    transport.kill()
