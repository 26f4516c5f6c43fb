"""Join several batches into one, and split it again. The *part* of a member is the batch restricted to its units.

The columns of member M are called ``M/<column>`` in the joined batch, and are zero at units of other members. The unit
column ``M/part`` marks the units of M. ``loss_mask``, ``temperature`` and ``experts``, which trainers read, also exist
as columns of all units.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

import torch
from rlhf.errors import TrainingError
from rlhf.ops.batch import Batch, concat
from rlhf.ops.experts import EXPERTS, UNKNOWN
from torch import Tensor

PART = "part"
SHARED = ("loss_mask", "temperature", EXPERTS)


def join(parts: Mapping[str, Batch], names: Iterable[str]) -> Batch:
    """The parts, one after another.

    Args:
        names: names of all members, also of members without a part.
    """
    bare = [replace(b, tok=_shared(b, parts.values()), seq={}, unit={}) for b in parts.values()]
    joined = concat(bare)
    tok, seq, unit = dict(joined.tok), dict(joined.seq), dict(joined.unit)
    token = sequence = first = 0
    member_units = {name: torch.zeros(joined.units, dtype=torch.bool) for name in names}
    tok |= {f"{name}/loss_mask": torch.zeros(joined.tokens, dtype=torch.bool) for name in member_units}
    for name, b in parts.items():
        if PART in b.unit or any("/" in column for column in (*b.tok, *b.seq, *b.unit)):
            raise TrainingError(
                f"member {name!r} creates a column named {PART!r} or with '/' in its name; neither is allowed"
            )
        for table, columns, start, size in (
            (tok, b.tok, token, joined.tokens),
            (seq, b.seq, sequence, joined.sequences),
            (unit, b.unit, first, joined.units),
        ):
            table |= {f"{name}/{c}": _padded(v, start, size) for c, v in columns.items() if c not in SHARED[1:]}
        member_units[name][first : first + b.units] = True
        token, sequence, first = token + b.tokens, sequence + b.sequences, first + b.units
    unit |= {f"{name}/{PART}": units_U for name, units_U in member_units.items()}
    return replace(joined, tok=tok, seq=seq, unit=unit)


def part(batch: Batch, name: str) -> Batch | None:
    """The part of a joined batch that belongs to this member, with its current columns; None if the member has no
    unit."""
    units_U = batch.unit[f"{name}/{PART}"]
    if not bool(units_U.any()):
        return None
    units = batch if bool(units_U.all()) else batch.keep(units_U[batch.unit_B])

    def member_columns(columns: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {c.removeprefix(f"{name}/"): v for c, v in columns.items() if c.startswith(f"{name}/")}

    shared = {c: units.tok[c] for c in SHARED if c in units.tok}
    unit = {c: v for c, v in member_columns(units.unit).items() if c != PART}
    return replace(units, tok={**member_columns(units.tok), **shared}, seq=member_columns(units.seq), unit=unit)


def _shared(b: Batch, parts: Collection[Batch]) -> dict[str, Tensor]:
    """The columns that members share. A part without ``temperature`` was sampled at 1 and gets this column. In a part
    without records, the experts are unknown."""
    shared = {"loss_mask": b.tok["loss_mask"]}
    if any("temperature" in other.tok for other in parts):
        shared["temperature"] = b.tok.get("temperature", torch.ones(b.tokens))
    if (like := next((o.tok[EXPERTS] for o in parts if EXPERTS in o.tok), None)) is not None:
        unknown = torch.full((b.tokens, *like.shape[1:]), UNKNOWN, dtype=like.dtype)
        shared[EXPERTS] = b.tok.get(EXPERTS, unknown)
    return shared


def _padded(values: Tensor, start: int, size: int) -> Tensor:
    # The only part: nothing to pad.
    if values.shape[0] == size:
        return values
    padded = values.new_zeros((size, *values.shape[1:]))
    padded[start : start + values.shape[0]] = values
    return padded
