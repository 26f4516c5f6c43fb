"""Gives rewards access to the models that the run holds for them: scores of sequences, and heads at chosen tokens."""

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
"""Name of the mask column that replaces the mask of the head itself."""


def score_with_role(roles: Mapping[str, Role], main: MainThread) -> ScoreWithRole:
    """A function that returns one score per sequence. Its forward pass runs on the main thread."""

    async def score(role: str, ids: Sequence[Sequence[int]]) -> list[float]:
        batch = pack([UnitData([SequenceData(sequence)]) for sequence in ids])
        with waiting():
            outputs = await main.call(lambda: roles[role].forward(batch, [SCORES]))
        return [float(v) for v in outputs["scores"].tolist()]

    return score


def read_role(roles: Mapping[str, Role], main: MainThread) -> ReadRole:
    """A function that returns a head's values at given positions. Without positions it skips the forward pass."""

    async def read(
        role: str, head: Head, ids: Sequence[Sequence[int]], positions: Sequence[Sequence[int]]
    ) -> list[list[Any]]:
        _check(head, ids, positions)
        if not any(positions):
            return [[] for _ in ids]
        batch = pack([UnitData([SequenceData(sequence)]) for sequence in ids])
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


@dataclass(slots=True)
class _Asked:
    """The calls for one role and head in one turn of the event loop."""

    role: str
    head: Head | None
    ids: list[Sequence[int]] = field(default_factory=list)
    positions: list[Sequence[int]] = field(default_factory=list)
    waiters: list[tuple[int, int, asyncio.Future[list[Any]]]] = field(default_factory=list)
    """(first, end, future) of each call's sequences."""


def together(score: ScoreWithRole, read: ReadRole) -> tuple[ScoreWithRole, ReadRole]:
    """The same two functions with batching: calls made in one turn of the event loop share one forward pass, in
    micro-batches of the role's token budget. Groups that are scored at the same time therefore share it. Values equal
    those of separate calls up to rounding.

    An invalid call fails alone. Where the model fails, all calls of that turn fail.
    """
    open_: list[_Asked] = []
    tasks: set[asyncio.Task[None]] = set()

    def begin(asked: _Asked, answer: Callable[[], Coroutine[Any, Any, list[Any]]]) -> None:
        open_.remove(asked)  # later calls belong to another forward pass
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
    """Give each call its part of the answer, or the error."""
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
