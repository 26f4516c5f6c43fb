"""Forward passes of reward models that several calls share."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlhf.errors import RewardError
from rlhf.interfaces import ReadRole, ScoreWithRole
from rlhf.interfaces.reward import Images
from rlhf.types import Head

from rlhf_runtime.calls.deadlines import waiting
from rlhf_runtime.rewards.reward_models import check_positions


@dataclass(frozen=True, slots=True)
class _Call:
    """The sequences of one call."""

    ids: Sequence[Sequence[int]]
    positions: Sequence[Sequence[int]]
    images: Images
    future: asyncio.Future[list[Any]]


@dataclass(slots=True)
class _Pass:
    """The calls that share a forward pass. They have the same role and head."""

    role: str
    head: Head | None
    calls: list[_Call] = field(default_factory=list)
    full: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def sequences(self) -> int:
        return sum(len(call.ids) for call in self.calls)


class SharedPasses:
    """The functions of :mod:`rlhf_runtime.rewards.reward_models` with batching. Calls share one forward pass if they
    are made in one turn of the event loop, or while another forward pass computes. The pass is computed in
    micro-batches of the role's token budget. So groups that are scored at the same time share passes. Values equal the
    values of separate calls up to rounding.

    An invalid call fails alone. If the model fails, all calls of the pass fail. A call that was cancelled before its
    pass begins is not computed.

    Args:
        wait: seconds that the first call of a pass waits for others, unless the pass is full.
        largest: largest number of sequences in a pass; None: no limit. A call is not divided, so a larger call has a
            pass to itself.
        passed: called with the number of sequences of each pass, before the pass begins.
    """

    def __init__(
        self,
        score: ScoreWithRole,
        read_values: ReadRole,
        wait: float = 0.0,
        largest: int | None = None,
        passed: Callable[[int], None] = lambda sequences: None,
    ) -> None:
        self._score, self._read_values = score, read_values
        self._wait, self._largest, self._passed = wait, largest, passed
        self._open: list[_Pass] = []
        """Passes that have not begun."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._turn = asyncio.Lock()
        """Passes are computed one after another. While one computes, calls gather for the next."""

    async def score(self, role: str, ids: Sequence[Sequence[int]], images: Images = ()) -> list[float]:
        """One score per sequence."""
        return await self._join(role, None, ids, (), images)

    async def read(
        self,
        role: str,
        head: Head,
        ids: Sequence[Sequence[int]],
        positions: Sequence[Sequence[int]],
        images: Images = (),
    ) -> list[list[Any]]:
        """A head's values at given positions."""
        check_positions(head, ids, positions)
        return await self._join(role, head, ids, positions, images)

    async def _join(
        self,
        role: str,
        head: Head | None,
        ids: Sequence[Sequence[int]],
        positions: Sequence[Sequence[int]],
        images: Images,
    ) -> list[Any]:
        if images and len(images) != len(ids):  # else images of other calls would be assigned to the wrong sequences
            raise RewardError(f"got {len(ids)} sequences, but images for {len(images)}")
        loop, largest = asyncio.get_running_loop(), self._largest
        forward = next((p for p in self._open if p.role == role and p.head is head and not p.full.is_set()), None)
        if forward is not None and largest is not None and forward.sequences + len(ids) > largest:
            forward.full.set()
            forward = None
        if forward is None:
            forward = _Pass(role, head)
            self._open.append(forward)
            # Not begun at once: other calls of this turn of the event loop join the pass before it begins.
            loop.call_soon(self._begin, forward)
        call = _Call(ids, positions, images, loop.create_future())
        forward.calls.append(call)
        if largest is not None and forward.sequences >= largest:
            forward.full.set()
        with waiting():
            return await call.future

    def _begin(self, forward: _Pass) -> None:
        task = asyncio.get_running_loop().create_task(self._compute(forward))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _compute(self, forward: _Pass) -> None:
        if self._wait:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(forward.full.wait(), self._wait)
        async with self._turn:
            self._open.remove(forward)  # later calls belong to another forward pass
            calls = [call for call in forward.calls if not call.future.done()]  # the others were cancelled
            if not calls:
                return
            try:
                results = iter(await self._results(forward, calls))
            except Exception as error:
                for call in calls:
                    if not call.future.done():
                        call.future.set_exception(error)
                return
        for call in calls:
            call_results = [next(results) for _ in call.ids]
            if not call.future.done():
                call.future.set_result(call_results)

    async def _results(self, forward: _Pass, calls: Sequence[_Call]) -> list[Any]:
        """The results for all sequences of the calls, in order."""
        ids = [sequence for call in calls for sequence in call.ids]
        images = [group for call in calls for group in call.images or [()] * len(call.ids)]
        self._passed(len(ids))
        if forward.head is None:
            return await self._score(forward.role, ids, images)
        positions = [p for call in calls for p in call.positions]
        return await self._read_values(forward.role, forward.head, ids, positions, images)
