"""One optimizer batch for the loss suite: leaf outputs, columns, and the evaluation that ranks perform."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from rlhf.interfaces.loss import Loss
from rlhf.ops.batch import Batch, ColumnLevel
from rlhf.ops.heads import BUILTIN, resolve_head
from rlhf.ops.loss_value import add_sums, evaluate, masks, over_mask, required_columns
from rlhf.ops.reduce import weigh
from rlhf.types import DataForm, Head
from torch import Tensor

from rlhf_testing import fabricate
from rlhf_testing.compare import padded
from rlhf_testing.contract import Contract, Nonconformance, expect
from rlhf_testing.recording import Recording

LEAF = "leaf/"

EXTREME: dict[str, tuple[float, float, float]] = {
    "log-ratios of +1e4": (0.0, -1e4, 1.0),
    "log-ratios of -1e4": (-1e4, 0.0, 1.0),
    "log-ratios of +1e4 and negated columns": (0.0, -1e4, -1.0),
    "log-ratios of -1e4 and negated columns": (-1e4, 0.0, -1.0),
    "columns of 1e4": (-1.0, -1.0, 1e4),
    "columns of zero": (-1.0, -1.0, 0.0),
}
"""{description: (log-prob outputs, log-prob columns, factor on all other columns)}."""


@dataclass
class BatchResult:
    """The result that the ranks would report for one optimizer batch."""

    total: float
    size: float
    """``sum |weight * value|`` over all terms. Loss differences are measured relative to it."""
    gradients: dict[str, Tensor]
    sums: dict[str, tuple[float, float]]


class LossSubject(Contract):
    """The loss under test, and the content of its batches."""

    kind = "loss"
    loss: Any = None
    data: DataForm | None = None
    """``pairs``: units of two sequences with roles 0 and 1. Default: the form that the loss declares, or
    ``prompts``."""
    coef: Mapping[str, float] = {}
    """Coefficients the algorithm passes (``Update.coef``)."""
    levels: Mapping[str, str] = {}
    """{column: ``tok`` | ``seq`` | ``unit``} for columns that are not per token. Columns of an online batch are
    known."""
    hidden_size: int = fabricate.HIDDEN
    """Hidden size of the made-up models, for columns that hold hidden states."""

    def column(self, name: str, size: int, seed: int) -> Tensor:
        """Values of a batch column. Override it for columns that are not plain numbers (an index, a 0/1 label)."""
        return fabricate.values(name, size, seed)

    def assembled(self, batch: Batch, seed: int) -> Batch:
        """The fabricated units in the layout of the loss's algorithm. Override it to add what ``prepare`` reads and
        then drops (sequences of another role, their masks and columns)."""
        return batch


class LossCase:
    """A fabricated optimizer batch, prepared and weighed by the loss under test."""

    def __init__(
        self,
        suite: LossSubject,
        loss: Loss,
        seed: int,
        *,
        extreme: tuple[float, float, float] | None = None,
        order: Sequence[int] | None = None,
        fresh: bool = True,
    ) -> None:
        self.suite, self.loss, self.seed, self.extreme = suite, loss, seed, extreme
        self.over = over_mask(loss)
        self.heads = [resolve_head(o, self.over) for o in loss.outputs()]
        form = suite.data or loss.data or "prompts"
        batch = fabricate.batch(seed, form=form, mask=self.over, fresh=fresh and form == "prompts")
        batch = suite.assembled(batch, seed)
        for head in self.heads:
            if head.over != "last_token" and head.over not in batch.tok:
                mask_N = batch.tok[self.over]
                if head.over in masks(loss):  # of a term with other tokens than the loss
                    mask_N = _context(batch, mask_N)
                batch = batch.with_column("tok", head.over, mask_N, over=None)
        produced = {a.column for a in loss.prepass()}
        # columns of the loss and of its heads, also those that prepass() fills in a run
        names = [*loss.columns(), *sorted(produced), *(c for h in self.heads for c in h.columns)]
        for name in dict.fromkeys(names):
            if not batch.has(name):
                batch = self._add_column(batch, name)
        self.leaves = {h.name: self._leaf(h, batch) for h in self.heads}
        for head in self.heads:
            leaf = self.leaves[head.name]
            if head.over == "last_token":
                batch = replace(batch, seq={**batch.seq, LEAF + head.name: leaf})
            else:
                batch = replace(batch, tok={**batch.tok, LEAF + head.name: leaf})
        if order is not None:
            batch = batch.select(order)
        self.plain = batch
        self.batch = self.prepare()

    # ------------------------------------------------------------------------------ building the batch

    def _add_column(self, batch: Batch, name: str) -> Batch:
        level = self.suite.levels.get(name, "unit" if name in fabricate.UNIT_COLUMNS else "tok")
        size = {"tok": batch.tokens, "seq": batch.sequences, "unit": batch.units}[level]
        values = self.suite.column(name, size, self.seed)
        if self.extreme is not None and values.is_floating_point():
            _, logprob, factor = self.extreme
            values = torch.full_like(values, logprob) if fabricate.is_logprob(name) else values * factor
        return batch.with_column(level, name, values, over=self.over)  # type: ignore[arg-type]

    def level(self, name: str) -> ColumnLevel:
        """The level of a column in the batch."""
        return "tok" if name in self.batch.tok else "seq" if name in self.batch.seq else "unit"

    def _leaf(self, head: Head, batch: Batch) -> Tensor:
        if head.name not in BUILTIN or head.reads == "hidden":  # the head's input; outputs() applies the head
            size = fabricate.VOCABULARY if head.reads == "logits" else fabricate.HIDDEN
            values = fabricate.values(f"{head.name}/{head.reads}", batch.tokens * size, self.seed).view(-1, size)
            if self.extreme is not None:
                values = values * abs(self.extreme[0])
        else:
            count = batch.sequences if head.over == "last_token" else batch.tokens
            values = fabricate.values(head.name, count, self.seed)
            if self.extreme is not None:
                logprob, _, factor = self.extreme
                values = torch.full_like(values, logprob) if fabricate.is_logprob(head.name) else values * factor
        return values.requires_grad_()

    def prepare(self, poison: bool = False) -> Batch:
        """The driver's part: ``prepare`` on the whole batch, then the weights. With ``poison`` the columns are NaN at
        masked positions, otherwise zero."""
        batch = self.plain
        if poison:
            for name, values in batch.tok.items():
                if values.is_floating_point() and not name.startswith(LEAF) and name != "temperature":
                    batch = batch.with_column("tok", name, self._poisoned(values, batch), over=self.over)
        return weigh(self.loss.prepare(batch), self.loss.reduce())

    def _poisoned(self, values_N: Tensor, batch: Batch) -> Tensor:
        mask_N = self._read(batch).view(-1, *[1] * (values_N.ndim - 1))
        return torch.where(mask_N, values_N, torch.full_like(values_N, float("nan")))

    def _read(self, batch: Batch) -> Tensor:
        """bool [N]: tokens under the mask of a term."""
        return torch.stack([batch.tok[over] for over in masks(self.loss)]).any(0)

    # ------------------------------------------------------------------------------- evaluating it

    def single_micro_batch(self) -> list[list[int]]:
        """One micro-batch with every unit."""
        return [list(range(self.batch.units))]

    def run(self, parts: Sequence[Sequence[int]], poison: bool = False) -> BatchResult:
        """Evaluate micro-batches of these units. Gradients with respect to the leaves add up."""
        batch = self.batch
        if poison:
            tok = {k: self._poisoned(v, batch) if v.is_floating_point() else v for k, v in batch.tok.items()}
            ids_N = torch.where(self._read(batch), batch.ids_N, batch.ids_N + 1)
            batch = replace(batch, tok=tok, ids_N=ids_N)
        names = required_columns(self.loss, self.heads)
        recorder, total, sums, gradients = (
            Recording(self.loss),
            0.0,
            [],
            {k: torch.zeros_like(v) for k, v in self.leaves.items()},
        )
        for part in parts:
            micro = batch.select(part)
            outputs = self.outputs(micro)
            inputs = micro.select_columns(names)
            watched = {**outputs, **inputs.seq, **inputs.unit}  # token columns are copied for every x[name]
            versions = {name: values._version for name, values in watched.items()}
            try:
                value, metrics = evaluate(recorder, inputs, outputs, self.suite.coef, {})  # type: ignore[arg-type]
            except (RuntimeError, IndexError) as error:
                self._suggest_levels(error)
                raise
            columns = [name for name, version in versions.items() if watched[name]._version != version]
            expect(not columns, f"{self.suite.label()} the call changes {columns} in place, which others read too")
            for name, gradient in self.gradients_of(value).items():
                gradients[name] += gradient
            total += float(value.detach())
            sums.append(metrics)
        return BatchResult(total, recorder.size, gradients, add_sums(sums))

    def _suggest_levels(self, error: Exception) -> None:
        """Explains an error about shapes: the suite may have created a column per token that should be per sequence or
        unit."""
        names = [n for n in self.loss.columns() if n in self.batch.tok and n not in self.suite.levels]
        if names:
            raise Nonconformance(
                f"{type(error).__name__}: {error}. The suite made one value per token for the columns "
                f"{', '.join(names)}. If one of them has one value per sequence or unit, declare it: conformance = "
                f'{{"levels": {{"{names[-1]}": "unit"}}}} in the loss\'s class'
            ) from error

    def outputs(self, micro: Batch) -> dict[str, Tensor]:
        """The model outputs of a micro-batch, as a trainer returns them, connected to the leaves for gradients."""
        outputs = {}
        for head in self.heads:
            if head.over == "last_token":
                outputs[head.name] = micro.seq[LEAF + head.name]
                continue
            mask_N = micro.tok[head.over]
            leaf = micro.tok[LEAF + head.name][mask_N]
            if head.name not in BUILTIN:
                columns = {c: micro.tok[c][mask_N] for c in head.columns}
                heads = {role: fabricate.output_head(role, self.seed) for role in head.lenders}
                leaf = head.fn(leaf, micro.ids_N[mask_N], columns, {**head.constants, **heads})
            outputs[head.name] = leaf
        return outputs

    def units_without(self, gradients: Mapping[str, Tensor]) -> list[int]:
        """Units with a token under the mask that no gradient reaches."""
        reached = torch.zeros(self.batch.units, dtype=torch.bool)
        for name, gradient in gradients.items():
            reached[self._unit_of(name)[gradient.flatten(1).any(1) if gradient.ndim > 1 else gradient != 0]] = True
        taught = torch.zeros_like(reached)
        taught[self.batch.unit_N[self._read(self.batch)]] = True
        return (taught & ~reached).nonzero()[:, 0].tolist()

    @contextlib.contextmanager
    def moved(self, unit: int, step: float) -> Iterator[None]:
        """Context in which all model outputs of a unit are larger by ``step``."""
        original = {name: leaf.detach().clone() for name, leaf in self.leaves.items()}
        with torch.no_grad():
            for name, leaf in self.leaves.items():
                leaf[self._unit_of(name) == unit] += step
        yield
        with torch.no_grad():
            for name, leaf in self.leaves.items():
                leaf.copy_(original[name])

    def _unit_of(self, name: str) -> Tensor:
        """int64: the unit of each row of a leaf."""
        return self.plain.unit_B if len(self.leaves[name]) == self.plain.sequences else self.plain.unit_N

    def gradients_of(self, total: Tensor) -> dict[str, Tensor]:
        """Gradients with respect to the leaves; zero where no gradient arrives."""
        if not total.requires_grad:
            return {k: torch.zeros_like(v) for k, v in self.leaves.items()}
        # If prepare() drops sequences, several runs share the graph from the leaves to the batch.
        gradients = torch.autograd.grad(total, list(self.leaves.values()), allow_unused=True, retain_graph=True)
        return {
            k: torch.zeros_like(v) if g is None else g for (k, v), g in zip(self.leaves.items(), gradients, strict=True)
        }


def _context(batch: Batch, mask_N: Tensor) -> Tensor:
    """bool [N]: tokens outside the mask, without first tokens, of units that have a token under the mask."""
    unit_U = torch.zeros(batch.units, dtype=torch.int64).index_add_(0, batch.unit_N, mask_N.long()) > 0
    return ~mask_N & (batch.position_N > 0) & unit_U[batch.unit_N]


class Padded:
    """The input of a plain statement: one row per sequence, right-padded, in float64, connected to the same leaves.

    ``x[name]`` is [B, T] for token outputs and columns (zero outside the mask), [B] per sequence, [U] per unit.
    """

    def __init__(self, case: LossCase, config: Any) -> None:
        batch = case.batch
        self.config, self.coef = config, dict(case.suite.coef)
        """The config under test and the coefficients of the update."""
        self._case, self._batch = case, batch
        self._rows = [torch.arange(int(s), int(s + n)) for s, n in zip(batch.starts_B, batch.lens_B, strict=True)]
        self._width = int(batch.lens_B.max())
        self.role_B, self.unit_B = batch.role_B, batch.unit_B
        """int64 [B]."""
        self.mask_BT = padded(batch.tok[case.over], self._rows, self._width)
        """bool [B, T]: the loss's mask."""
        self.ids_BT = padded(batch.ids_N, self._rows, self._width)

    def __getitem__(self, name: str) -> Tensor:
        batch = self._batch
        outputs = self._case.outputs(batch)
        if name in outputs:
            values, over = outputs[name], {head.name: head.over for head in self._case.heads}[name]
            mask_N = batch.tok[over if over in masks(self._case.loss) else self._case.over]
            if values.shape[0] != int(mask_N.sum()) or name == "scores":
                return values.double()
            values_N = values.new_zeros((batch.tokens, *values.shape[1:])).masked_scatter(
                mask_N.view(-1, *[1] * (values.ndim - 1)).expand(batch.tokens, *values.shape[1:]), values
            )
            return padded(values_N.double(), self._rows, self._width)
        if name in batch.tok:
            column = batch.tok[name]
            return padded(column.double() if column.is_floating_point() else column, self._rows, self._width)
        return batch.column(name).double()

    def read_by(self, name: str) -> Tensor:
        """[B, T, V]: the logits that the declared head ``name`` reads ([B, T, H] if it reads hidden states)."""
        return padded(self._batch.tok[LEAF + name].double(), self._rows, self._width)
