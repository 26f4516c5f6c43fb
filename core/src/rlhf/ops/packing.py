"""Pack units into a batch: lists of Python values become flat tensors."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from rlhf.ops.batch import Batch
from rlhf.types import Image

_FLOATS = {"f": torch.float32, "d": torch.float64}


@dataclass(slots=True)
class SequenceData:
    """One sequence before packing: token ids and per-token columns of the same length."""

    ids: Sequence[int]
    tok: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    role: int = 0
    images: tuple[Image, ...] = ()


@dataclass(slots=True)
class UnitData:
    """One unit before packing."""

    sequences: list[SequenceData]
    columns: Mapping[str, float | int | bool] = field(default_factory=dict)


def pack(units: Sequence[UnitData]) -> Batch:
    """Make one batch of units. All sequences need the same token columns, all units the same columns.

    Columns of Python bools become bool, ints int64, floats float32 (unit columns: float64), arrays of ints and floats
    likewise. The mask ``loss_mask`` is cleared at the first token of every sequence.
    """
    sequences = [s for u in units for s in u.sequences]
    if not sequences or any(not u.sequences for u in units) or any(len(s.ids) == 0 for s in sequences):
        raise ValueError(
            "pack() needs at least one unit, each unit at least one sequence, and each sequence at least one token"
        )
    for u in units:
        if set(u.columns) != set(units[0].columns):
            raise ValueError(f"units have different columns: {sorted(units[0].columns)} and {sorted(u.columns)}")
    names = set(sequences[0].tok)
    for s in sequences:
        if set(s.tok) != names:
            raise ValueError(f"sequences have different columns: {sorted(names)} and {sorted(s.tok)}")
        for name, values in s.tok.items():
            if len(values) != len(s.ids):
                raise ValueError(f"column {name!r} has {len(values)} values for {len(s.ids)} tokens")
    batch = Batch(
        _joined([s.ids for s in sequences]).to(torch.int64),
        torch.tensor([len(s.ids) for s in sequences], dtype=torch.int64),
        torch.tensor([n for n, u in enumerate(units) for _ in u.sequences], dtype=torch.int64),
        torch.tensor([s.role for s in sequences], dtype=torch.int64),
    )
    tok = {name: _joined([s.tok[name] for s in sequences]) for name in sorted(names)}
    if "loss_mask" in tok:
        tok["loss_mask"][batch.starts_B] = False
    unit = {name: _joined([[u.columns[name] for u in units]], "d") for name in sorted(units[0].columns)}
    images = tuple(s.images for s in sequences)
    return replace(batch, tok=tok, unit=unit, images_B=images if any(images) else ())


def _joined(parts: Sequence[Sequence[Any]], floats: str = "f") -> Tensor:
    """The values of all parts, one after another. ``floats``: the type code of an array of Python floats."""
    kinds = {part.typecode if isinstance(part, array) else "" for part in parts}
    if len(kinds) == 1 and (kind := kinds.pop()):
        arrays = cast("Sequence[array[Any]]", parts)
        # A bytearray, because bytes are read-only and torch warns about read-only memory.
        values_N = torch.from_numpy(np.frombuffer(bytearray().join(arrays), kind))
        return values_N.to(_FLOATS[floats] if values_N.is_floating_point() else torch.int64)
    values = list(chain.from_iterable(parts))
    if isinstance(values[0], bool):
        return torch.frombuffer(bytearray(values), dtype=torch.uint8).bool()
    kind = "q" if isinstance(values[0], int) else floats
    return torch.from_numpy(np.frombuffer(array(kind, values), kind))
