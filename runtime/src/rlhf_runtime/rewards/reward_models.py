"""Gives rewards access to the models that the run holds for them: scores of sequences, and heads at chosen tokens."""

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

from rlhf_runtime.workers.deadlines import waiting
from rlhf_runtime.workers.main_thread import MainThread

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
        for start, read in zip(batch.starts_B.tolist(), positions, strict=True):
            mask_N[[start + i for i in read]] = True
        batch = batch.with_column("tok", POSITIONS, mask_N, over=None)
        asked = replace(head, over=POSITIONS)
        with waiting():
            outputs = await main.call(lambda: roles[role].forward(batch, [asked]))
        values = iter(outputs[head.name][mask_N].tolist())
        return [[next(values) for _ in read] for read in positions]

    return read


@dataclass(frozen=True, slots=True)
class _Call:
    """The sequences of one call."""

    ids: Sequence[Sequence[int]]
    positions: Sequence[Sequence[int]]
    images: Images
    done: asyncio.Future[list[Any]]


@dataclass(slots=True)
class _Asked:
    """The calls that share a forward pass: of one role and head."""

    role: str
    head: Head | None
    calls: list[_Call] = field(default_factory=list)
    full: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def sequences(self) -> int:
        return sum(len(call.ids) for call in self.calls)


def together(
    score: ScoreWithRole,
    read: ReadRole,
    wait: float = 0.0,
    largest: int | None = None,
    passed: Callable[[int], None] = lambda sequences: None,
) -> tuple[ScoreWithRole, ReadRole]:
    """The same two functions with batching: calls made in one turn of the event loop, or while another forward pass
    computes, share one forward pass, in micro-batches of the role's token budget. Groups that are scored at the same
    time therefore share it. Values equal those of separate calls up to rounding.

    An invalid call fails alone. Where the model fails, all calls of that pass fail. A call that was cancelled before
    its pass begins is not computed.

    Args:
        wait: seconds that the first call of a pass waits for others, unless the pass is full.
        largest: most sequences of a pass; None: no limit. A call is not divided, so a larger one has a pass to itself.
        passed: told the number of sequences of each pass, before it begins.
    """
    open_: list[_Asked] = []
    tasks: set[asyncio.Task[None]] = set()
    turn = asyncio.Lock()
    """Passes are computed one after another. While one computes, calls gather for the next."""

    async def compute(asked: _Asked) -> None:
        if wait:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asked.full.wait(), wait)
        async with turn:
            open_.remove(asked)  # later calls belong to another forward pass
            calls = [call for call in asked.calls if not call.done.done()]  # the others were cancelled
            if not calls:
                return
            ids = [one for call in calls for one in call.ids]
            images = [one for call in calls for one in call.images or [()] * len(call.ids)]
            passed(len(ids))
            try:
                if asked.head is None:
                    found: list[Any] = await score(asked.role, ids, images)
                else:
                    positions = [p for call in calls for p in call.positions]
                    found = await read(asked.role, asked.head, ids, positions, images)
            except Exception as error:
                for call in calls:
                    if not call.done.done():
                        call.done.set_exception(error)
                return
        values = iter(found)
        for call in calls:
            own = [next(values) for _ in call.ids]
            if not call.done.done():
                call.done.set_result(own)

    def begin(asked: _Asked) -> None:
        task = asyncio.get_running_loop().create_task(compute(asked))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    async def join(
        role: str, head: Head | None, ids: Sequence[Sequence[int]], positions: Sequence[Sequence[int]], images: Images
    ) -> list[Any]:
        if images and len(images) != len(ids):  # else those of other calls would be at the wrong sequences
            raise RewardError(f"{len(ids)} sequences and images of {len(images)}")
        loop = asyncio.get_running_loop()
        asked = next((a for a in open_ if a.role == role and a.head is head and not a.full.is_set()), None)
        if asked is not None and largest is not None and asked.sequences + len(ids) > largest:
            asked.full.set()
            asked = None
        if asked is None:
            asked = _Asked(role, head)
            open_.append(asked)
            loop.call_soon(begin, asked)
        call = _Call(ids, positions, images, loop.create_future())
        asked.calls.append(call)
        if largest is not None and asked.sequences >= largest:
            asked.full.set()
        with waiting():
            return await call.done

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
    return pack([UnitData([SequenceData(one, images=own)]) for one, own in sequences])


def _check(head: Head, ids: Sequence[Sequence[int]], positions: Sequence[Sequence[int]]) -> None:
    if head.columns or head.lent:
        raise RewardError(f"head {head.name!r} needs columns or another role's head, which a reward cannot give it")
    if len(ids) != len(positions):
        raise RewardError(f"head {head.name!r} is asked of {len(ids)} sequences at {len(positions)} lists of positions")
    for sequence, read in zip(ids, positions, strict=True):
        first = 1 if head.at == "before" else 0  # nothing predicts a sequence's first token
        if list(read) != sorted(set(read)) or (read and not first <= read[0] <= read[-1] < len(sequence)):
            raise RewardError(
                f"head {head.name!r} is asked at {list(read)} of a sequence of {len(sequence)} tokens; positions "
                f"increase and lie in {first} .. {len(sequence) - 1}"
            )
