"""A batch of units: flat tokens with columns per token, sequence and unit. Padding does not exist here.

A *unit* is what is never split: a trajectory, a pair, an answer with its mismatched twin, a row. A unit has one or
more *sequences* (of tokens that attend to each other), each with a role in its unit (0 = chosen, 1 = rejected, ...).

Shape suffixes: N tokens, B sequences, U units.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from rlhf.ops.spans import owners, spans

ColumnLevel = Literal["tok", "seq", "unit"]


@dataclass(slots=True)
class SequenceData:
    """One sequence before packing: token ids and per-token columns of the same length."""

    ids: Sequence[int]
    tok: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    role: int = 0


@dataclass(slots=True)
class UnitData:
    """One unit before packing."""

    sequences: list[SequenceData]
    columns: Mapping[str, float | int | bool] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Batch:
    """Immutable; every operation returns a new batch that shares tensors where it can.

    ``tok["loss_mask"]`` is bool [N]; the first token of a sequence is never under it, as nothing predicts it.
    A column's masked positions are zeroed once, when it enters through :meth:`with_column`, so whatever stood
    there (NaN included) changes nothing afterwards, bit for bit.
    """

    ids_N: Tensor
    """int64."""
    lens_B: Tensor
    """int64, all > 0, sums to N."""
    unit_B: Tensor
    """int64, non-decreasing, 0 .. U-1 without gaps."""
    role_B: Tensor
    """int64."""
    tok: dict[str, Tensor] = field(default_factory=dict)
    seq: dict[str, Tensor] = field(default_factory=dict)
    unit: dict[str, Tensor] = field(default_factory=dict)

    # ------------------------------------------------------------------------------ sizes and maps

    @property
    def tokens(self) -> int:
        return int(self.ids_N.numel())

    @property
    def sequences(self) -> int:
        return int(self.lens_B.numel())

    @property
    def units(self) -> int:
        return int(self.unit_B[-1]) + 1 if self.sequences else 0

    @property
    def seq_N(self) -> Tensor:
        """int64 [N]: the sequence of each token."""
        return owners(self.lens_B)

    @property
    def unit_N(self) -> Tensor:
        """int64 [N]: the unit of each token."""
        return self.unit_B[self.seq_N]

    @property
    def starts_B(self) -> Tensor:
        """int64 [B]: position of each sequence's first token."""
        return torch.cumsum(self.lens_B, 0) - self.lens_B

    @property
    def position_N(self) -> Tensor:
        """int64 [N]: position of each token in its sequence, from 0."""
        return torch.arange(self.tokens, device=self.lens_B.device) - self.starts_B[self.seq_N]

    @property
    def answer_B(self) -> Tensor:
        """int64 [B]: index of each sequence's (unit, role) pair, in order of first appearance: what reductions call
        a sequence. A trajectory whose context was rewritten half-way is several sequences and one answer."""
        return self._answers()[0]

    @property
    def answers(self) -> int:
        """Number of (unit, role) pairs."""
        return self._answers()[1]

    def _answers(self) -> tuple[Tensor, int]:
        if not self.sequences:
            return self.unit_B, 0
        key_B = self.unit_B * (int(self.role_B.max()) + 1) + self.role_B
        values, inverse_B = torch.unique(key_B, return_inverse=True)  # sorted by unit, then role
        return inverse_B, int(values.numel())

    # ------------------------------------------------------------------------------------- columns

    def has(self, name: str) -> bool:
        return name in self.tok or name in self.seq or name in self.unit

    def column(self, name: str) -> Tensor:
        for level in (self.tok, self.seq, self.unit):
            if name in level:
                return level[name]
        present = sorted({*self.tok, *self.seq, *self.unit})
        raise KeyError(f"no column {name!r} in the batch; there are {present}")

    def with_column(self, level: ColumnLevel, name: str, values: Tensor, over: str | None = "loss_mask") -> Batch:
        """Add or replace a column. Token columns are zeroed where the mask ``over`` is False (None: keep all)."""
        expected = {"tok": self.tokens, "seq": self.sequences, "unit": self.units}[level]
        if values.shape[:1] != (expected,):
            raise ValueError(f"column {name!r} per {level} needs {expected} values, got shape {tuple(values.shape)}")
        if level == "tok" and over is not None:
            mask_N = self.tok[over]
            values = torch.where(mask_N.view(-1, *[1] * (values.ndim - 1)), values, torch.zeros_like(values))
        if level == "tok":
            return replace(self, tok={**self.tok, name: values})
        if level == "seq":
            return replace(self, seq={**self.seq, name: values})
        return replace(self, unit={**self.unit, name: values})

    def only(self, names: Sequence[str]) -> Batch:
        """The batch with just these columns: what a call declares is all that travels."""
        keep = set(names)
        return replace(
            self,
            tok={k: v for k, v in self.tok.items() if k in keep},
            seq={k: v for k, v in self.seq.items() if k in keep},
            unit={k: v for k, v in self.unit.items() if k in keep},
        )

    # ---------------------------------------------------------------------------------- reordering

    def select(self, units: Sequence[int]) -> Batch:
        """These units, in this order, renumbered from 0."""
        unit_index = torch.as_tensor(list(units), dtype=torch.int64)
        first_U = torch.searchsorted(self.unit_B, torch.arange(self.units + 1))
        count_U = (first_U[1:] - first_U[:-1])[unit_index]
        seq_index = spans(first_U[unit_index], count_U)
        lens = self.lens_B[seq_index]
        token_index = spans(self.starts_B[seq_index], lens)
        return Batch(
            self.ids_N[token_index],
            lens,
            owners(count_U),
            self.role_B[seq_index],
            {k: v[token_index] for k, v in self.tok.items()},
            {k: v[seq_index] for k, v in self.seq.items()},
            {k: v[unit_index] for k, v in self.unit.items()},
        )

    def keep(self, keep_B: Tensor) -> Batch:
        """Without the sequences where ``keep_B`` (bool [B]) is False; units that lose all theirs go too, the others are
        renumbered from 0."""
        keep_N = keep_B[self.seq_N]
        units, unit_B = torch.unique(self.unit_B[keep_B], return_inverse=True)
        return Batch(
            self.ids_N[keep_N],
            self.lens_B[keep_B],
            unit_B,
            self.role_B[keep_B],
            {k: v[keep_N] for k, v in self.tok.items()},
            {k: v[keep_B] for k, v in self.seq.items()},
            {k: v[units] for k, v in self.unit.items()},
        )

    def tokens_per_unit(self) -> list[int]:
        return torch.zeros(self.units, dtype=torch.int64).index_add_(0, self.unit_B, self.lens_B).tolist()

    def to(self, device: torch.device | str) -> Batch:
        def move(columns: dict[str, Tensor]) -> dict[str, Tensor]:
            return {k: v.to(device) for k, v in columns.items()}

        return Batch(
            self.ids_N.to(device),
            self.lens_B.to(device),
            self.unit_B.to(device),
            self.role_B.to(device),
            move(self.tok),
            move(self.seq),
            move(self.unit),
        )


def pack(units: Sequence[UnitData]) -> Batch:
    """Lay units out as one batch. All sequences need the same token columns, all units the same columns.

    Columns of Python bools become bool, ints int64, floats float32 (unit columns: float64). The mask
    ``loss_mask`` is cleared at the first token of every sequence.
    """
    sequences = [s for u in units for s in u.sequences]
    if not sequences or any(not u.sequences for u in units) or any(len(s.ids) == 0 for s in sequences):
        raise ValueError("pack needs at least one unit; each unit at least one sequence; each sequence one token")
    names = set(sequences[0].tok)
    for s in sequences:
        if set(s.tok) != names:
            raise ValueError(f"sequences have different columns: {sorted(names)} and {sorted(s.tok)}")
        for name, values in s.tok.items():
            if len(values) != len(s.ids):
                raise ValueError(f"column {name!r} has {len(values)} values for {len(s.ids)} tokens")
    batch = Batch(
        torch.tensor([i for s in sequences for i in s.ids], dtype=torch.int64),
        torch.tensor([len(s.ids) for s in sequences], dtype=torch.int64),
        torch.tensor([n for n, u in enumerate(units) for _ in u.sequences], dtype=torch.int64),
        torch.tensor([s.role for s in sequences], dtype=torch.int64),
    )
    tok = {name: _tensor([v for s in sequences for v in s.tok[name]], torch.float32) for name in sorted(names)}
    if "loss_mask" in tok:
        tok["loss_mask"] = tok["loss_mask"] & (batch.position_N > 0)
    unit = {name: _tensor([u.columns[name] for u in units], torch.float64) for name in sorted(units[0].columns)}
    return replace(batch, tok=tok, unit=unit)


def concat(batches: Sequence[Batch]) -> Batch:
    """Batches with the same columns, one after another."""
    offset, units = 0, []
    for b in batches:
        units.append(b.unit_B + offset)
        offset += b.units

    def join(level: str) -> dict[str, Tensor]:
        return {k: torch.cat([getattr(b, level)[k] for b in batches]) for k in getattr(batches[0], level)}

    return Batch(
        torch.cat([b.ids_N for b in batches]),
        torch.cat([b.lens_B for b in batches]),
        torch.cat(units),
        torch.cat([b.role_B for b in batches]),
        join("tok"),
        join("seq"),
        join("unit"),
    )


def _tensor(values: list[Any], floating: torch.dtype) -> Tensor:
    first = values[0]
    dtype = torch.bool if isinstance(first, bool) else torch.int64 if isinstance(first, int) else floating
    return torch.tensor(values, dtype=dtype)
