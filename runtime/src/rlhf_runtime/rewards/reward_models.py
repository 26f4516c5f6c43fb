"""Gives rewards access to their models in the run: scores of sequences, and heads at chosen tokens."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from rlhf.errors import RewardError
from rlhf.interfaces import ReadRole, ScoreWithRole
from rlhf.interfaces.reward import Images
from rlhf.ops.batch import Batch
from rlhf.ops.heads import SCORES
from rlhf.ops.packing import SequenceData, UnitData, pack
from rlhf.types import Head

from rlhf_runtime.calls.deadlines import waiting
from rlhf_runtime.calls.main_thread import MainThread

if TYPE_CHECKING:
    from rlhf_runtime.models.roles import Role

POSITIONS = "positions"
"""Name of the mask column that replaces the mask of the head itself."""


def score_with_role(roles: Mapping[str, Role], main: MainThread) -> ScoreWithRole:
    """A function that returns one score per sequence. Its forward pass runs on the main thread."""

    async def score(role: str, ids: Sequence[Sequence[int]], images: Images = ()) -> list[float]:
        batch = _packed(ids, images)
        with waiting():
            outputs = await main.call(lambda: roles[role].forward(batch, [SCORES]))
        return [float(v) for v in outputs["scores"].tolist()]

    return score


def read_role(roles: Mapping[str, Role], main: MainThread) -> ReadRole:
    """A function that returns a head's values at given positions. Without positions it skips the forward pass."""

    async def read(
        role: str, head: Head, ids: Sequence[Sequence[int]], positions: Sequence[Sequence[int]], images: Images = ()
    ) -> list[list[Any]]:
        _check(head, ids, positions)
        if not any(positions):
            return [[] for _ in ids]
        batch = _packed(ids, images)
        mask_N = torch.zeros(batch.tokens, dtype=torch.bool)
        for start, indices in zip(batch.starts_B.tolist(), positions, strict=True):
            mask_N[[start + i for i in indices]] = True
        batch = batch.with_column("tok", POSITIONS, mask_N, over=None)
        masked_head = replace(head, over=POSITIONS)
        with waiting():
            outputs = await main.call(lambda: roles[role].forward(batch, [masked_head]))
        values = iter(outputs[head.name][mask_N].tolist())
        return [[next(values) for _ in indices] for indices in positions]

    return read


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


def batch_calls(
    score: ScoreWithRole,
    reader: ReadRole,
    wait: float = 0.0,
    largest: int | None = None,
    passed: Callable[[int], None] = lambda sequences: None,
) -> tuple[ScoreWithRole, ReadRole]:
    """The same two functions with batching. Calls share one forward pass if they are made in one turn of the event
    loop, or while another forward pass computes. The pass is computed in micro-batches of the role's token budget. So
    groups that are scored at the same time share passes. Values equal the values of separate calls up to rounding.

    An invalid call fails alone. If the model fails, all calls of the pass fail. A call that was cancelled before its
    pass begins is not computed.

    Args:
        wait: seconds that the first call of a pass waits for others, unless the pass is full.
        largest: largest number of sequences in a pass; None: no limit. A call is not divided, so a larger call has a
            pass to itself.
        passed: called with the number of sequences of each pass, before the pass begins.
    """
    open_: list[_Pass] = []
    tasks: set[asyncio.Task[None]] = set()
    turn = asyncio.Lock()
    """Passes are computed one after another. While one computes, calls gather for the next."""

    async def compute(forward: _Pass) -> None:
        if wait:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(forward.full.wait(), wait)
        async with turn:
            open_.remove(forward)  # later calls belong to another forward pass
            calls = [call for call in forward.calls if not call.future.done()]  # the others were cancelled
            if not calls:
                return
            ids = [sequence for call in calls for sequence in call.ids]
            images = [group for call in calls for group in call.images or [()] * len(call.ids)]
            passed(len(ids))
            try:
                if forward.head is None:
                    results: list[Any] = await score(forward.role, ids, images)
                else:
                    positions = [p for call in calls for p in call.positions]
                    results = await reader(forward.role, forward.head, ids, positions, images)
            except Exception as error:
                for call in calls:
                    if not call.future.done():
                        call.future.set_exception(error)
                return
        values = iter(results)
        for call in calls:
            call_results = [next(values) for _ in call.ids]
            if not call.future.done():
                call.future.set_result(call_results)

    def begin(forward: _Pass) -> None:
        task = asyncio.get_running_loop().create_task(compute(forward))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    async def join(
        role: str, head: Head | None, ids: Sequence[Sequence[int]], positions: Sequence[Sequence[int]], images: Images
    ) -> list[Any]:
        if images and len(images) != len(ids):  # else images of other calls would be assigned to the wrong sequences
            raise RewardError(f"got {len(ids)} sequences, but images for {len(images)}")
        loop = asyncio.get_running_loop()
        forward = next((p for p in open_ if p.role == role and p.head is head and not p.full.is_set()), None)
        if forward is not None and largest is not None and forward.sequences + len(ids) > largest:
            forward.full.set()
            forward = None
        if forward is None:
            forward = _Pass(role, head)
            open_.append(forward)
            # Not begun at once: other calls of this turn of the event loop join the pass before it begins.
            loop.call_soon(begin, forward)
        call = _Call(ids, positions, images, loop.create_future())
        forward.calls.append(call)
        if largest is not None and forward.sequences >= largest:
            forward.full.set()
        with waiting():
            return await call.future

    async def score_together(role: str, ids: Sequence[Sequence[int]], images: Images = ()) -> list[float]:
        return await join(role, None, ids, (), images)

    async def read_together(
        role: str, head: Head, ids: Sequence[Sequence[int]], positions: Sequence[Sequence[int]], images: Images = ()
    ) -> list[list[Any]]:
        _check(head, ids, positions)
        return await join(role, head, ids, positions, images)

    return score_together, read_together


def _packed(ids: Sequence[Sequence[int]], images: Images) -> Batch:
    """A unit for each sequence."""
    sequences = zip(ids, images or [()] * len(ids), strict=True)
    return pack([UnitData([SequenceData(sequence, images=images)]) for sequence, images in sequences])


def _check(head: Head, ids: Sequence[Sequence[int]], positions: Sequence[Sequence[int]]) -> None:
    if head.columns or head.lenders:
        raise RewardError(f"head {head.name!r} needs columns or another role's head, which a reward cannot provide")
    if len(ids) != len(positions):
        raise RewardError(f"head {head.name!r} got {len(ids)} sequences, but {len(positions)} lists of positions")
    for sequence, indices in zip(ids, positions, strict=True):
        first = 1 if head.position == "before" else 0  # nothing predicts a sequence's first token
        if list(indices) != sorted(set(indices)) or (
            indices and not first <= indices[0] <= indices[-1] < len(sequence)
        ):
            raise RewardError(
                f"head {head.name!r} got the positions {list(indices)} in a sequence of {len(sequence)} tokens; "
                f"positions must increase and lie in {first} .. {len(sequence) - 1}"
            )
