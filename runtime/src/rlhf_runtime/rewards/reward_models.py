"""What rewards ask of the models that the run holds for them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from rlhf.errors import RewardError
from rlhf.interfaces import ReadRole, ScoreWithRole
from rlhf.ops.batch import SequenceData, UnitData, pack
from rlhf.ops.heads import SCORES
from rlhf.types import Head

from rlhf_runtime.workers.deadlines import waiting
from rlhf_runtime.workers.main_thread import MainThread

if TYPE_CHECKING:
    from rlhf_runtime.models.roles import Role

POSITIONS = "positions"
"""The mask that stands for a head's own."""


def score_with_role(roles: Mapping[str, Role], main: MainThread) -> ScoreWithRole:
    """One score per sequence; the forward pass runs on the main thread."""

    async def score(role: str, ids: Sequence[Sequence[int]]) -> list[float]:
        batch = pack([UnitData([SequenceData(list(sequence))]) for sequence in ids])
        with waiting():
            outputs = await main.call(lambda: roles[role].forward(batch, [SCORES]))
        return [float(v) for v in outputs["scores"].tolist()]

    return score


def read_role(roles: Mapping[str, Role], main: MainThread) -> ReadRole:
    """A head at given tokens; sequences of which nothing is read are not computed."""

    async def read(
        role: str, head: Head, ids: Sequence[Sequence[int]], positions: Sequence[Sequence[int]]
    ) -> list[list[Any]]:
        _check(head, ids, positions)
        if not any(positions):
            return [[] for _ in ids]
        mask_N = torch.tensor([i in read for sequence, read in zip(ids, map(set, positions), strict=True)
                               for i in range(len(sequence))])  # fmt: skip
        batch = pack([UnitData([SequenceData(list(sequence))]) for sequence in ids])
        batch = batch.with_column("tok", POSITIONS, mask_N, over=None)
        asked = replace(head, over=POSITIONS)
        with waiting():
            outputs = await main.call(lambda: roles[role].forward(batch, [asked]))
        values = iter(outputs[head.name][mask_N].tolist())
        return [[next(values) for _ in read] for read in positions]

    return read


@dataclass(slots=True)
class _Asked:
    """What is asked of one role and head in one turn of the event loop."""

    role: str
    head: Head | None
    ids: list[Sequence[int]] = field(default_factory=list)
    positions: list[Sequence[int]] = field(default_factory=list)
    waiters: list[tuple[int, int, asyncio.Future[list[Any]]]] = field(default_factory=list)
    """(first, end, future) of each call's sequences."""


def together(score: ScoreWithRole, read: ReadRole) -> tuple[ScoreWithRole, ReadRole]:
    """The same two, but calls that are made in one turn of the event loop are one forward pass, in micro-batches of the
    role's token budget: groups that are scored at once share it. Values are those of single calls but for rounding.

    A call that is not allowed fails alone; where the model fails, all calls of the turn do.
    """
    open_: list[_Asked] = []
    tasks: set[asyncio.Task[None]] = set()

    def begin(asked: _Asked, answer: Callable[[], Coroutine[Any, Any, list[Any]]]) -> None:
        open_.remove(asked)  # what is asked from now on is another pass
        task = asyncio.get_running_loop().create_task(_give(asked, answer))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    async def join(
        role: str, head: Head | None, ids: Sequence[Sequence[int]], positions: Sequence[Sequence[int]]
    ) -> list[Any]:
        loop = asyncio.get_running_loop()
        asked = next((a for a in open_ if a.role == role and a.head is head), None)
        if asked is None:
            asked = new = _Asked(role, head)
            open_.append(asked)

            async def answer() -> list[Any]:
                if new.head is None:
                    return await score(new.role, new.ids)
                return await read(new.role, new.head, new.ids, new.positions)

            loop.call_soon(begin, asked, answer)
        first = len(asked.ids)
        asked.ids += ids
        asked.positions += positions
        done: asyncio.Future[list[Any]] = loop.create_future()
        asked.waiters.append((first, len(asked.ids), done))
        with waiting():
            return await done

    async def score_together(role: str, ids: Sequence[Sequence[int]]) -> list[float]:
        return await join(role, None, ids, ())

    async def read_together(
        role: str, head: Head, ids: Sequence[Sequence[int]], positions: Sequence[Sequence[int]]
    ) -> list[list[Any]]:
        _check(head, ids, positions)
        return await join(role, head, ids, positions)

    return score_together, read_together


async def _give(asked: _Asked, answer: Callable[[], Coroutine[Any, Any, list[Any]]]) -> None:
    """To each call its part of the answer, or the error."""
    try:
        found = await answer()
    except Exception as error:
        for _, _, future in asked.waiters:
            if not future.done():  # its coroutine may have been cancelled
                future.set_exception(error)
        return
    for first, end, future in asked.waiters:
        if not future.done():
            future.set_result(found[first:end])


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
