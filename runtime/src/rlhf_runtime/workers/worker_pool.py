"""A pool of workers of one plugin. Its size is limited, and dead workers are replaced."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator

from rlhf.errors import RlhfError
from rlhf.interfaces.component import ComponentConfig
from rlhf.plugins import Resolved

from rlhf_runtime.workers.worker import Worker


class WorkerPool:
    """At most ``size`` workers of one plugin. Callers that wait for a worker are served in order of arrival."""

    def __init__(
        self,
        resolved: Resolved,
        config: ComponentConfig | None,
        error: type[RlhfError],
        size: int = 1,
        label: str = "",
        python: str | None = None,
    ) -> None:
        self.resolved, self.config, self.error, self.label, self.python = resolved, config, error, label, python
        self._free = size
        self._idle: list[Worker] = []
        self._workers: list[Worker] = []
        self._waiting: deque[asyncio.Future[None]] = deque()

    @contextlib.asynccontextmanager
    async def worker(self) -> AsyncIterator[Worker]:
        """A worker for exclusive use. The time spent waiting for it is not part of any deadline."""
        worker = await self.acquire()
        try:
            yield worker
        finally:
            self.release(worker)

    async def acquire(self) -> Worker:
        """A started worker that belongs to the caller until :meth:`release`."""
        await self._permit()
        try:
            while self._idle:
                worker = self._idle.pop()
                if worker.running:
                    return worker
                worker.kill()  # it died while idle, which is not a failure of this call
                self._workers.remove(worker)
            worker = Worker(self.resolved, self.config, self.error, self.label, self.python)
            self._workers.append(worker)
            try:
                await worker.start()
            except BaseException:
                worker.kill()
                self._workers.remove(worker)
                raise
            return worker
        except BaseException:
            self._pass_on()
            raise

    def release(self, worker: Worker) -> None:
        """Return a worker to the pool. A dead one is replaced when the next one is needed."""
        if worker.alive:
            self._idle.append(worker)
        else:
            self._workers.remove(worker)
        self._pass_on()

    def close(self) -> None:
        """Kill all workers."""
        for worker in self._workers:
            worker.kill()
        self._idle.clear()

    async def _permit(self) -> None:
        if self._free and not self._waiting:
            self._free -= 1
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._waiting.remove(turn)
            else:  # cancelled just after it received the permit
                self._pass_on()
            raise

    def _pass_on(self) -> None:
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        self._free += 1
