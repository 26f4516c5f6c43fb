"""A batch of units: flat tokens with columns per token, sequence and unit, without padding.

A *unit* is never split over micro-batches or ranks: a trajectory, a pair, a row, or an answer together with the same
answer after another prompt. A unit has one or more *sequences* (of tokens that attend to each other), each with a role
in its unit (0 = chosen, 1 = rejected, ...).

Shape suffixes: N tokens, B sequences, U units.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from rlhf.ops.spans import empty, moved, owners, spans
from rlhf.types import Image

ColumnLevel = Literal["tok", "seq", "unit"]


@dataclass(frozen=True, slots=True)
class Batch:
    """Immutable. Every operation returns a new batch that shares tensors with the old one if possible.

    ``tok["loss_mask"]`` is bool [N]. It is False at the first token of a sequence, which no output predicts.
    :meth:`with_column` sets the masked positions of a column to zero, so values there (including NaN) have no effect.
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
    images_B: tuple[tuple[Image, ...], ...] = ()
    """The images of each sequence, in order; empty if no sequence has one. ``Image.start`` counts from the sequence's
    first token."""
    source: Batch | None = None
    """The batch on the CPU that :meth:`to` copied. Values are read from it, because a read from a GPU waits for the
    GPU's work."""

    # ------------------------------------------------------------------------------ sizes and maps

    @property
    def tokens(self) -> int:
        return int(self.ids_N.numel())

    @property
    def sequences(self) -> int:
        return int(self.lens_B.numel())

    @property
    def host(self) -> Batch:
        """The batch to read values from: :attr:`source`, or this one."""
        return self if self.source is None else self.source

    @property
    def units(self) -> int:
        return int(self.host.unit_B[-1]) + 1 if self.sequences else 0

    @property
    def seq_N(self) -> Tensor:
        """int64 [N]: the sequence of each token."""
        return self.read(lambda batch: owners(batch.lens_B))

    @property
    def unit_N(self) -> Tensor:
        """int64 [N]: the unit of each token."""
        return self.read(lambda batch: owners(batch._tokens_U()))

    def index(self, mask: str) -> Tensor:
        """int64 [A]: the tokens under a mask."""
        return self.read(lambda batch: batch.tok[mask].nonzero()[:, 0])

    @property
    def starts_B(self) -> Tensor:
        """int64 [B]: position of each sequence's first token."""
        return torch.cumsum(self.lens_B, 0) - self.lens_B

    @property
    def position_N(self) -> Tensor:
        """int64 [N]: position of each token in its sequence, from 0."""
        return torch.arange(self.tokens, device=self.lens_B.device) - self.starts_B[self.seq_N]

    @property
    def image_N(self) -> Tensor:
        """bool [N], on the CPU: the tokens that stand for an image."""
        mask_N = torch.zeros(self.tokens, dtype=torch.bool)
        for start, images in zip(self.starts_B.tolist(), self.images_B, strict=False):  # none: no sequence has one
            for image in images:
                mask_N[start + image.start : start + image.start + image.tokens] = True
        return mask_N

    @property
    def answer_B(self) -> Tensor:
        """int64 [B]: index of each sequence's (unit, role) pair, in order of first appearance. Reductions call such a
        pair a sequence. A trajectory whose context was rewritten has several sequences and one answer."""
        return self.read(lambda batch: batch._answers()[0])

    @property
    def answers(self) -> int:
        """Number of (unit, role) pairs."""
        return self.host._answers()[1]

    def _answers(self) -> tuple[Tensor, int]:
        if not self.sequences:
            return self.unit_B, 0
        key_B = self.unit_B * (int(self.role_B.max()) + 1) + self.role_B
        values, inverse_B = torch.unique(key_B, return_inverse=True)  # sorted by unit, then role
        return inverse_B, int(values.numel())

    def read(self, fact: Callable[[Batch], Tensor]) -> Tensor:
        """The result of ``fact`` for :attr:`host`, moved to this batch's device."""
        return moved(fact(self.host), self.ids_N.device)

    # ------------------------------------------------------------------------------------- columns

    def has(self, name: str) -> bool:
        return name in self.tok or name in self.seq or name in self.unit

    def column(self, name: str) -> Tensor:
        for level in (self.tok, self.seq, self.unit):
            if name in level:
                return level[name]
        present = sorted({*self.tok, *self.seq, *self.unit})
        raise KeyError(f"the batch has no column {name!r}; its columns are {present}")

    def with_column(self, level: ColumnLevel, name: str, values: Tensor, over: str | None = "loss_mask") -> Batch:
        """Add or replace a column. Token columns are zeroed where the mask ``over`` is False (None: keep all)."""
        expected = {"tok": self.tokens, "seq": self.sequences, "unit": self.units}[level]
        if values.shape[:1] != (expected,):
            raise ValueError(f"column {name!r} per {level} needs {expected} values, got shape {tuple(values.shape)}")
        if level == "tok" and over is not None:
            mask_N = self.tok[over]
            # Not a product with the mask, because 0 x NaN is NaN.
            values = torch.where(mask_N.view(-1, *[1] * (values.ndim - 1)), values, values.new_zeros(()))
        if level == "tok":
            # source = None: the batch on the CPU does not have the new column.
            return replace(self, tok={**self.tok, name: values}, source=None)
        if level == "seq":
            return replace(self, seq={**self.seq, name: values}, source=None)
        return replace(self, unit={**self.unit, name: values}, source=None)

    def select_columns(self, names: Sequence[str]) -> Batch:
        """The batch with these columns only. A call sends only the columns that it declares."""
        keep = set(names)
        return replace(
            self,
            tok={k: v for k, v in self.tok.items() if k in keep},
            seq={k: v for k, v in self.seq.items() if k in keep},
            unit={k: v for k, v in self.unit.items() if k in keep},
            source=None,
        )

    # ---------------------------------------------------------------------------------- reordering

    def select(self, units: Sequence[int]) -> Batch:
        """These units, in this order, renumbered from 0."""
        unit_index = torch.as_tensor(list(units), dtype=torch.int64)
        first_U = torch.searchsorted(self.unit_B, torch.arange(self.units + 1))
        count_U = (first_U[1:] - first_U[:-1])[unit_index]
        seq_index = spans(first_U[unit_index], count_U)
        pieces = list(zip(self.starts_B[seq_index].tolist(), self.lens_B[seq_index].tolist(), strict=True))

        tokens = sum(count for _, count in pieces)

        def take(values_N: Tensor) -> Tensor:  # copies whole sequences: faster than an index of all tokens
            parts = [values_N[:0], *(values_N.narrow(0, start, count) for start, count in pieces)]
            if values_N.requires_grad:  # with out= there would be no gradient
                return torch.cat(parts)
            return torch.cat(parts, out=empty((tokens, *values_N.shape[1:]), values_N.dtype))

        return Batch(
            take(self.ids_N),
            self.lens_B[seq_index],
            owners(count_U),
            self.role_B[seq_index],
            {k: take(v) for k, v in self.tok.items()},
            {k: v[seq_index] for k, v in self.seq.items()},
            {k: v[unit_index] for k, v in self.unit.items()},
            self._images(seq_index.tolist()),
        )

    def between(self, first: int, last: int) -> Batch:
        """The units ``first`` to ``last - 1``, renumbered from 0. Shares the memory of this batch."""
        begin, end = torch.searchsorted(self.unit_B, torch.tensor([first, last])).tolist()
        offset = int(self.lens_B[:begin].sum())
        tokens = slice(offset, offset + int(self.lens_B[begin:end].sum()))
        return Batch(
            self.ids_N[tokens],
            self.lens_B[begin:end],
            self.unit_B[begin:end] - first,
            self.role_B[begin:end],
            {k: v[tokens] for k, v in self.tok.items()},
            {k: v[begin:end] for k, v in self.seq.items()},
            {k: v[first:last] for k, v in self.unit.items()},
            self._images(range(begin, end)),
        )

    def keep(self, keep_B: Tensor) -> Batch:
        """Remove the sequences for which ``keep_B`` (bool [B]) is False. Units without sequences are removed too, and
        the other units are renumbered from 0."""
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
            self._images(keep_B.nonzero().flatten().tolist()),
        )

    def _images(self, sequences: Iterable[int]) -> tuple[tuple[Image, ...], ...]:
        """The images of these sequences."""
        return _images([self.images_B[b] for b in sequences]) if self.images_B else ()

    def tokens_per_unit(self) -> list[int]:
        return self._tokens_U().tolist()

    def _tokens_U(self) -> Tensor:
        return self.lens_B.new_zeros(self.units).index_add_(0, self.unit_B, self.lens_B)

    def to(self, device: torch.device | str) -> Batch:
        if self.ids_N.device == torch.device(device):
            return self

        def move(columns: dict[str, Tensor]) -> dict[str, Tensor]:
            return {k: moved(v, device) for k, v in columns.items()}

        return Batch(
            moved(self.ids_N, device),
            moved(self.lens_B, device),
            moved(self.unit_B, device),
            moved(self.role_B, device),
            move(self.tok),
            move(self.seq),
            move(self.unit),
            self.images_B,
            None if torch.device(device).type == "cpu" else self.host,
        )


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
        _images([images for b in batches for images in b.images_B or ((),) * b.sequences]),
    )


def _images(images_B: Sequence[tuple[Image, ...]]) -> tuple[tuple[Image, ...], ...]:
    return tuple(images_B) if any(images_B) else ()
