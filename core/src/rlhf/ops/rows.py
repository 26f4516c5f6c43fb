"""Tokenised rows as units of a batch, one unit per row."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from rlhf.ops.batch import Batch
from rlhf.ops.packing import SequenceData, UnitData, pack

if TYPE_CHECKING:
    from rlhf.types.examples import Example


def pack_rows(examples: Sequence[Example], taught: Callable[[Iterable[bool]], bool] = any) -> Batch | None:
    """Units of the rows' sequences, with the token column ``loss_mask`` and a unit column for each numeric value of the
    rows: ``margin`` (``data.margin``), ``label``. None if no row is left.

    Args:
        taught: decides whether a row is kept. Its argument has one bool per sequence of the row: whether a token of the
            sequence is trained on. A sequence's first token does not count, because no output predicts it.
    """
    units = [
        UnitData(
            [SequenceData(s.ids, {"loss_mask": s.loss_mask}, s.role, s.images) for s in example.sequences],
            {name: value for name, value in example.values.items() if isinstance(value, int | float)},
        )
        for example in examples
        if taught(any(s.loss_mask[1:]) for s in example.sequences)
    ]
    return pack(units) if units else None
