"""What rewards ask of the models that the run holds for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from rlhf.controller.calls import waiting
from rlhf.controller.mainthread import MainThread
from rlhf.errors import RewardError
from rlhf.interfaces import ReadRole, ScoreWithRole
from rlhf.ops.batch import SequenceData, UnitData, pack
from rlhf.ops.heads import SCORES
from rlhf.types import Head

if TYPE_CHECKING:
    from rlhf.controller.roles import Role

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
