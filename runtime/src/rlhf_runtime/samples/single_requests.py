"""Generation sample by sample: each request is answered when it is done, whatever the other samples do."""

from __future__ import annotations

import asyncio

from rlhf.errors import RlhfError, WorkerError
from rlhf.interfaces import Generator
from rlhf.types import GenerationRequest, Turn

from rlhf_runtime.workers.deadlines import cause


class SingleRequests:
    """Used from the event loop only, as :class:`rlhf_runtime.samples.waves.Waves` is: each sample awaits :meth:`enter`
    once, :meth:`generate` any number of times and calls :meth:`leave` once.

    Args:
        generator: has the capability ``answers``.
        limit: samples that may be live at once (an environment's concurrency).
    """

    def __init__(self, generator: Generator, limit: int | None = None) -> None:
        self._generator = generator
        self._places = None if limit is None else asyncio.Semaphore(limit)
        self._under_way = 0
        """Requests that are not answered."""
        self._open, self._quiet = asyncio.Event(), asyncio.Event()
        self._open.set()
        self._quiet.set()

    async def enter(self, order: tuple[int, ...]) -> None:
        """Wait until a place is free."""
        if self._places is not None:
            await self._places.acquire()

    def leave(self) -> None:
        """A sample has ended."""
        if self._places is not None:
            self._places.release()

    async def generate(self, order: tuple[int, ...], request: GenerationRequest) -> Turn:
        """The sampled turn."""
        while not self._open.is_set():  # it may be held again before this coroutine goes on
            await self._open.wait()
        self._under_way += 1
        self._quiet.clear()
        try:
            return await self._generator.answer(request)
        except RlhfError:
            raise
        except Exception as error:  # of the generator itself: no sample, rollout or environment has failed
            raise WorkerError(f"generator {self._generator.name!r} raised {cause(error)}") from error
        finally:
            self._under_way -= 1
            if not self._under_way:
                self._quiet.set()

    def hold(self) -> asyncio.Event:
        """The generator gets no further request before :meth:`release`. Returns an event that is set once every earlier
        request is answered."""
        self._open.clear()
        return self._quiet

    def release(self) -> None:
        """The generator gets the requests that were held, and further ones."""
        self._open.set()

    async def settled(self) -> None:
        """Nothing is under way once every sample has left."""
