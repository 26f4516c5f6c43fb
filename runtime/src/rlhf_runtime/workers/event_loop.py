"""The event loop of rollouts, rewards and environments. At its end it kills the processes that coroutines started, and
cancels the tasks that are left."""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from typing import Any

GRACE = 2.0
"""Maximum seconds to wait for killed processes to end, and again for cancelled tasks."""


class Loop(asyncio.SelectorEventLoop):
    """Records the processes that coroutines start through asyncio. A coroutine that is cancelled at its deadline leaves
    its process running; without this record the process would outlive the run."""

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

    async def end(self) -> None:
        """Ask the processes that still run to end, kill those that do not, cancel the tasks that are left (connections
        that a plugin holds for the whole run), and stop the loop. Each waits up to :data:`GRACE` seconds."""
        # a supervisor that is asked ends all descendants of its process; one that is killed cannot
        for method in ("terminate", "kill"):
            for transport in list(self._started):
                if transport.get_returncode() is None:
                    with contextlib.suppress(ProcessLookupError):
                        getattr(transport, method)()
            last = self.time() + GRACE
            while any(transport.get_returncode() is None for transport in self._started) and self.time() < last:
                await asyncio.sleep(0.01)
        tasks = asyncio.all_tasks(self) - {asyncio.current_task(self)}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=GRACE)
        self.stop()
