"""The input of a loss: the tokens of a micro-batch under the loss's mask, without padding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from rlhf.errors import TrainingError
from rlhf.ops.batch import Batch


class LossInput:
    """A micro-batch as a loss reads it. It has only the A tokens under the loss's mask.

    ``x[name]`` is a declared output or column: [A, ...] per token, [S] or [B] per sequence, [U] per unit. A *sequence*
    here is the tokens of one (unit, role); there are S of them. S = B if no context was rewritten.

    Further attributes: ``x.tokens``, ``x.sequences`` and ``x.units`` are the numbers A, S and U. ``x.sequence_A`` and
    ``x.unit_A``, int64 [A], are the sequence and the unit of each token. ``x.coef[name]`` are the update's coefficients
    (:attr:`Update.coef`).
    """

    def __init__(
        self,
        batch: Batch,
        outputs: Mapping[str, Tensor],
        columns: Sequence[str],
        over: str,
        coef: Mapping[str, float],
        live: Mapping[str, str],
        loss: str,
    ) -> None:
        self._batch, self._loss = batch, loss  # its name, for messages
        self._index_A, self._over = batch.index(over), over
        self._outputs, self._live = outputs, live
        self._columns = frozenset(columns)
        self.coef = dict(coef)
        self.answer_B = batch.answer_B
        self.sequence_A = self.answer_B[batch.seq_N[self._index_A]]
        self.sequences = batch.answers
        self.units = batch.units
        self.unit_A = batch.unit_N[self._index_A]
        self.tokens = int(self.sequence_A.numel())

    def __getitem__(self, name: str) -> Tensor:
        if name in self._outputs:
            return self._outputs[name]
        if name not in self._columns:
            raise TrainingError(
                f"loss {self._loss!r} reads {name!r}, which it does not declare. Declared outputs: "
                f"{sorted(self._outputs)}, columns: {sorted(self._columns)}. Add it to outputs() or columns()."
            )
        batch = self._batch
        if name in batch.tok:
            return batch.tok[name][self._index_A]
        if name in batch.seq:
            return batch.seq[name]
        if name in batch.unit:
            return batch.unit[name]
        if name in self._live:
            return self._outputs[self._live[name]].detach()
        raise TrainingError(
            f"loss {self._loss!r} needs the column {name!r}, which the batch does not have: "
            "the algorithm must annotate it (Algorithm.annotations) before the update."
        )

    def has(self, name: str) -> bool:
        """Whether ``x[name]`` exists: an output, or a declared column that the batch has."""
        if name in self._outputs:
            return True
        return name in self._columns and (self._batch.has(name) or name in self._live)

    def of_units(self, keep_U: Tensor, prefix: str, columns: Sequence[str], loss: str) -> LossInput:
        """The input of another loss that reads only the units for which ``keep_U`` (bool [U]) is True, in their order.

        A batch may contain units of several kinds, each with its own columns. In the result, the prefix is removed from
        the names of columns, coefficients and live columns that start with it. It is also removed from the names of
        outputs, whose mask must then cover these units only. Outputs with another prefix (a "/" in their name) are left
        out. All outputs must be per token.

        Args:
            columns: the names without ``prefix`` that the other loss may read.
            loss: its name, for messages.
        """
        keep_B = keep_U[self._batch.unit_B]
        selection = self._batch.keep(keep_B)

        def columns_with_prefix(columns_of: Mapping[str, Tensor]) -> dict[str, Tensor]:
            return {name.removeprefix(prefix): v for name, v in columns_of.items() if name.startswith(prefix)}

        batch = replace(
            selection,
            tok={**columns_with_prefix(selection.tok), self._over: selection.tok[self._over]},
            seq=columns_with_prefix(selection.seq),
            unit=columns_with_prefix(selection.unit),
        )
        keep_A = keep_U[self.unit_A]
        coef = {name.removeprefix(prefix): v for name, v in self.coef.items() if name.startswith(prefix)}
        live = {name.removeprefix(prefix): o for name, o in self._live.items() if name.startswith(prefix)}
        outputs = {name: values_A[keep_A] for name, values_A in self._outputs.items() if "/" not in name}
        outputs |= columns_with_prefix(self._outputs)
        return LossInput(batch, outputs, columns, self._over, coef, live, loss)

    @property
    def unit_S(self) -> Tensor:
        """int64 [S]: which unit each sequence belongs to."""
        # All sequences of an answer are of one unit, so it does not matter which of them is written last.
        return self._batch.unit_B.new_zeros(self.sequences).index_put((self.answer_B,), self._batch.unit_B)

    def sum_per_sequence(self, values_A: Tensor) -> Tensor:
        """[A] -> [S]; an empty sequence gives 0."""
        return values_A.new_zeros(self.sequences).index_add(0, self.sequence_A, values_A)

    def mean_per_sequence(self, values_A: Tensor) -> Tensor:
        """[A] -> [S]; an empty sequence gives 0, never NaN."""
        count_S = self.sum_per_sequence(torch.ones_like(values_A))
        return self.sum_per_sequence(values_A) / count_S.clamp(min=1)

    def to_tokens(self, values_S: Tensor) -> Tensor:
        """[S] -> [A]."""
        return values_S[self.sequence_A]

    def of_role(self, values_S: Tensor, role: int) -> Tensor:
        """[S] -> [U]: the value of each unit's sequence of that role (every unit must have one)."""
        # unique() sorts, and answers are numbered unit by unit.
        index_U = self._batch.read(lambda batch: torch.unique(batch.answer_B[batch.role_B == role]))
        if len(index_U) != self.units:
            raise TrainingError(
                f"loss {self._loss!r} reads the sequence of role {role} in every unit, but {len(index_U)} of "
                f"{self.units} units have one. Use it with an algorithm on pairs, whose units have roles 0 and 1; for "
                '`rlhf plugins check`, set data = "pairs" in its class'
            )
        return values_S[index_U]
