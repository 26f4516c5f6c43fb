"""Gives rewards access to their models in the run: scores of sequences, and heads at chosen tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
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
        check_positions(head, ids, positions)
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


def _packed(ids: Sequence[Sequence[int]], images: Images) -> Batch:
    """A unit for each sequence."""
    sequences = zip(ids, images or [()] * len(ids), strict=True)
    return pack([UnitData([SequenceData(sequence, images=images)]) for sequence, images in sequences])


def check_positions(head: Head, ids: Sequence[Sequence[int]], positions: Sequence[Sequence[int]]) -> None:
    """Raises RewardError if a reward cannot read the head at these positions."""
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
