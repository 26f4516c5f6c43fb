"""A role: one model over its ranks. It splits batches into shares and joins the results."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rlhf.errors import TrainingError
from rlhf.interfaces import ApplyResult, Loss, ModelSpec, Sums, TrainerFacts, WorkerGroup
from rlhf.ops.batch import Batch
from rlhf.ops.experts import EXPERTS, UNKNOWN
from rlhf.ops.heads import gives, resolve_head
from rlhf.ops.loss_value import FILLER, add_sums, masks, over_mask, required_columns
from rlhf.ops.reduce import WEIGHT
from rlhf.ops.spans import spans
from rlhf.types import Annotation, Head, Lent, Update
from torch import Tensor

from rlhf_runtime.models.dispatch import Plan, fillers, micro_batches, plan, unit_prefixes


@dataclass(slots=True)
class Work:
    """The amount of computation of updates."""

    tokens: int = 0
    """Tokens of whole samples. A prefix that is computed once for several samples counts for each of them."""
    operations: float = 0.0
    """Floating-point operations (:attr:`TrainerFacts.flops`)."""
    seconds: float = 0.0


class Role:
    """The controller's interface to a model.

    A batch is split into one *share* for each group of ranks that divide the model's layers (usually one rank). A share
    is split into micro-batches of at most ``budget`` tokens. A longer unit has a micro-batch to itself.
    """

    changes = 0
    """Number of calls that changed the role's weights: optimizer steps and snapshots."""
    steps_taken = 0
    """Optimizer steps so far in this step of the run (:meth:`catch_up`)."""

    def __init__(self, spec: ModelSpec, group: WorkerGroup, budget: int | None, view: str = "live") -> None:
        """``budget``: token budget of a micro-batch; None: the trainer's (``TrainerFacts.token_budget``)."""
        self.spec, self.group = spec, group
        self.facts: TrainerFacts = group.call("facts", [()] * group.size)[0]
        self.budget = self.facts.token_budget if budget is None else budget
        self.work = Work()
        """Work since the last :meth:`take_work`."""
        self.view = view
        """The view that ``live`` means for this role: ``base`` if it is another role's model without its adapters."""

    @property
    def name(self) -> str:
        return self.spec.role.name

    def annotate(self, batch: Batch, annotations: Sequence[Annotation]) -> Batch:
        """Add ``annotation.column := output`` for each annotation, with one forward pass per view."""
        for view in dict.fromkeys(a.view for a in annotations):
            same_view = [a for a in annotations if a.view == view]
            heads = [self._head(a.output) for a in same_view]
            outputs = self.forward(batch, heads, view)
            for annotation, head in zip(same_view, heads, strict=True):
                values = outputs[head.name]
                level, over = ("seq", None) if head.over == "last_token" else ("tok", head.over)
                batch = batch.with_column(level, annotation.column, values, over=over)  # type: ignore[arg-type]
        return batch

    def forward(self, batch: Batch, heads: Sequence[Head], view: str = "live") -> dict[str, Tensor]:
        """Outputs over the whole batch, without gradient: [N, ...], or [B] for sequence outputs. Sequences that no head
        reads are not computed."""
        return self.begin_forward(batch, heads, view)()

    def begin_forward(self, batch: Batch, heads: Sequence[Head], view: str = "live") -> Callable[[], dict[str, Tensor]]:
        """:meth:`forward` without waiting. Returns a function that waits for the outputs."""
        read_B = _sequence_mask(batch, heads)
        if not bool(read_B.all()):
            # Every sequence of the smaller batch is read, so this calls itself only once.
            wait, read_N = self.begin_forward(batch.keep(read_B), heads, view), read_B[batch.seq_N]
            return lambda: {name: _spread_over(read_N, values) for name, values in wait().items()}
        view = self.view if view == "live" else view
        # Trainers divide logits by the temperature of each token, which no head names.
        needed = {"temperature", *(h.over for h in heads), *(c for h in heads for c in h.columns)}
        needed |= {EXPERTS} if self.facts.experts is not None and view == "live" else set()
        slim = batch.select_columns(sorted(needed))
        shares = self._plan(slim)
        results = self._begin("forward", [(share, list(heads), view) for share in micro_batches(slim, shares)])

        def outputs() -> dict[str, Tensor]:
            values = results()
            return {h.name: _join(batch, shares, values, h) for h in heads}

        return outputs

    def update(self, batch: Batch, loss: Loss, update: Update) -> tuple[Sums, ApplyResult]:
        """One optimizer step on ``batch``, which already has its weight columns. Units without a signal
        (:meth:`Loss.signal`) are not computed, unless the trainer has its own auxiliary loss, which reads all units."""
        computed = (
            batch if self.facts.wants_token_share else with_signal(batch.select_columns(self._columns(loss)), loss)
        )
        per_share = self._with_loss(computed, loss, update)
        # Counted before the call: a step that fails may have changed the weights of some ranks (Saves.rescue).
        self.changes += 1
        self.steps_taken += 1
        start = time.perf_counter()
        results = self._call("update", per_share)
        self.work.seconds += time.perf_counter() - start
        self.work.tokens += computed.tokens
        if self.facts.flops is not None:
            counts = [int(computed.tok[over].sum()) for over in masks(loss) if over in computed.tok]
            outputs = sum(counts) if counts else computed.sequences
            self.work.operations += self.facts.flops.of_update(computed.lens_B.tolist(), outputs)
        sums = add_sums(sums for sums, _ in results)
        if loss.signal():
            sums["tokens_left_out"] = (float(batch.tokens - computed.tokens), float(batch.tokens))
        if self.facts.experts is not None:
            experts_NLK = computed.tok.get(EXPERTS)
            unknown = computed.tokens if experts_NLK is None else int((experts_NLK[:, 0, 0] == UNKNOWN).sum())
            sums["experts_unrecorded"] = (float(unknown), float(computed.tokens))
        return sums, results[0][1]

    def take_work(self) -> Work:
        """The work of the updates since the last call."""
        work, self.work = self.work, Work()
        return work

    def catch_up(self, planned: int) -> None:
        """End a step of the run. If fewer than ``planned`` optimizer steps were taken, the learning-rate schedule
        advances by the missing steps, so that it ends with the run."""
        missed, self.steps_taken = planned - self.steps_taken, 0
        if missed > 0:
            # The schedule is saved with the weights, so a state that was held no longer fits them (Saves.rescue).
            self.changes += 1
            self.every("skip_updates", missed)

    def evaluate(self, batch: Batch, loss: Loss, update: Update) -> Sums:
        """The metric sums of an optimizer batch, without learning from it."""
        return add_sums(self._call("evaluate", self._with_loss(batch, loss, update)))

    def accumulate(self, batch: Batch, loss: Loss, update: Update) -> Sums:
        """Add the gradients of a batch to the accumulated gradients, until :meth:`apply`. The batch already has its
        weight columns."""
        return add_sums(self._call("accumulate", self._with_loss(batch, loss, update)))

    def apply(self) -> ApplyResult:
        """One optimizer step with the accumulated gradients."""
        self.changes += 1
        self.steps_taken += 1
        result: ApplyResult = self.every("apply")[0]
        return result

    def gradients(self, batch: Batch, loss: Loss, update: Update) -> dict[str, Tensor]:
        """Gradients of one optimizer batch, without the optimizer step. They are discarded afterwards."""
        self.accumulate(batch, loss, update)
        gradients: dict[str, Tensor] = {}
        for rank in self.every("gradients"):
            for name, value in rank.items():
                gradients[name] = gradients[name] + value if name in gradients else value.clone()
        self.every("zero_grad")
        return gradients

    def every(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method on every rank with the same arguments. Returns the result of each rank."""
        return self.group.call(method, [arguments] * self.group.size)

    def _call(self, method: str, per_share: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Call every rank of a share with the same arguments. Returns the result of each share's first rank."""
        return self._begin(method, per_share)()

    def _begin(self, method: str, per_share: Sequence[tuple[Any, ...]]) -> Callable[[], list[Any]]:
        """:meth:`_call` without waiting."""
        ranks = self.facts.ranks_per_share
        results = self.group.begin(method, [arguments for arguments in per_share for _ in range(ranks)])
        return lambda: results()[::ranks]

    def _with_loss(self, batch: Batch, loss: Loss, update: Update) -> list[tuple[Any, ...]]:
        """(micro-batches, loss, coefficients, live columns) of each share."""
        return [(micros, loss, dict(update.coef), dict(update.live)) for micros in self._shares(batch, loss)]

    def _shares(self, batch: Batch, loss: Loss) -> list[list[Batch]]:
        """The micro-batches of each share, with the columns that the loss reads. Fillers have weight 0. They give all
        ranks the same number of micro-batches."""
        slim = batch.select_columns(self._columns(loss))
        if self.facts.wants_token_share:
            share_U = torch.tensor(slim.tokens_per_unit(), dtype=torch.float32) / slim.tokens
            slim = slim.with_column("unit", f"{WEIGHT}tokens", share_U, over=None)
        shares = self._plan(slim)
        return [
            [
                _without_weight(micro, [units.index(u) for u in of_filler])
                for micro, units, of_filler in zip(micros, share, of_fillers, strict=True)
            ]
            for micros, share, of_fillers in zip(micro_batches(slim, shares), shares, fillers(shares), strict=True)
        ]

    def _columns(self, loss: Loss) -> tuple[str, ...]:
        """Every column that a rank needs to evaluate ``loss``."""
        columns = required_columns(loss, [self._head(o, over_mask(loss)) for o in loss.outputs()])
        return columns if self.facts.experts is None else (*columns, EXPERTS)

    def _plan(self, batch: Batch) -> Plan:
        count = self.group.size // self.facts.ranks_per_share
        if not self.facts.shares_prefixes:
            return plan(batch.tokens_per_unit(), count, self.budget)
        units = unit_prefixes(batch)
        return plan(units.tokens, count, self.budget, units.order, units.shared)

    def _head(self, output: str | Head, over: str | None = None) -> Head:
        return self.head_of(self.spec, output, over)

    @staticmethod
    def head_of(spec: ModelSpec, output: str | Head, over: str | None = None) -> Head:
        """The head for ``output`` of a role. Raises TrainingError if its model does not have this output."""
        try:
            head = resolve_head(output, over)
        except KeyError as unknown:
            raise TrainingError(str(unknown.args[0])) from None
        if isinstance(output, str) and not gives(spec.role.head, output):
            raise TrainingError(
                f"role {spec.role.name!r} has a {spec.role.head!r} head, which does not give {output!r}"
            )
        return head


def with_signal(batch: Batch, loss: Loss) -> Batch:
    """The units in which a column of ``loss.signal()`` is not 0. If there are none, the shortest unit with a token
    under the loss's mask, because the optimizer step is taken anyway, with gradients of zero."""
    columns = loss.signal()
    if not columns:
        return batch
    if unknown := [name for name in columns if name not in loss.columns()]:  # no unit would have a signal
        raise TrainingError(
            f"signal() of loss {loss.name!r} names {unknown}; columns() declares only {[*loss.columns()]}. A string in "
            'place of a tuple is read letter by letter: write ("advantages",)'
        )
    signal_U = torch.zeros(batch.units, dtype=torch.bool)
    for name in columns:
        if batch.has(name):
            signal_U |= _nonzero(batch, name)
    if bool(signal_U.all()):
        return batch
    if not bool(signal_U.any()):
        masked_U, tokens = _nonzero(batch, over_mask(loss)).tolist(), batch.tokens_per_unit()
        signal_U[min(range(batch.units), key=lambda u: (not masked_U[u], tokens[u]))] = True
    return batch.select(signal_U.nonzero().flatten().tolist())


def _nonzero(batch: Batch, column: str) -> Tensor:
    """bool [U]: units in which the column has a value other than 0."""
    values = batch.column(column)
    if column in batch.unit:
        return (values != 0).reshape(batch.units, -1).any(1)
    unit = batch.unit_N if column in batch.tok else batch.unit_B
    different = (values != 0).reshape(len(unit), -1).any(1)
    return torch.zeros(batch.units, dtype=torch.int64).index_add_(0, unit, different.long()) > 0


def _sequence_mask(batch: Batch, heads: Sequence[Head]) -> Tensor:
    """bool [B]: sequences with a token under a head's mask; all if a head reads every sequence, or if none is read."""
    read_B, seq_N = torch.zeros(batch.sequences, dtype=torch.bool), batch.seq_N
    for head in heads:
        if head.over not in batch.tok:  # last_token, or a mask that the trainer will miss
            return torch.ones_like(read_B)
        masked_B = torch.zeros(batch.sequences, dtype=torch.int64).index_add_(0, seq_N, batch.tok[head.over].long())
        read_B |= masked_B > 0  # indexing by a mask wakes every thread for it (rlhf.ops.spans)
    return read_B if bool(read_B.any()) else torch.ones_like(read_B)


def _spread_over(mask_N: Tensor, values: Tensor) -> Tensor:
    """[tokens under the mask, ...] -> [N, ...], zero elsewhere."""
    out_N = values.new_zeros((mask_N.numel(), *values.shape[1:]))
    out_N[mask_N] = values
    return out_N


def _join(batch: Batch, shares: Plan, results: Sequence[Sequence[Mapping[str, Tensor]]], head: Head) -> Tensor:
    """[N, ...], or [B] for outputs of whole sequences: the outputs of the micro-batches, in the order of the batch."""
    per_sequence = head.over == "last_token"
    sizes_B = torch.ones_like(batch.lens_B) if per_sequence else batch.lens_B
    size_U = torch.zeros(batch.units, dtype=torch.int64).index_add_(0, batch.unit_B, sizes_B)
    start_U = torch.cumsum(size_U, 0) - size_U
    joined: Tensor | None = None
    for share, outputs in zip(shares, results, strict=True):
        for units, micro in zip(share, outputs, strict=True):
            values = micro[head.name]
            index = spans(start_U[units], size_U[units])
            if joined is None:
                joined = values.new_zeros((int(size_U.sum()), *values.shape[1:]))
            joined[index] = values
    assert joined is not None
    return joined


def _without_weight(micro: Batch, units: Sequence[int]) -> Batch:
    """Zero the weights of filler units and mark them, so that they are computed but have no effect."""
    if not units:
        return micro
    filler_U = torch.zeros(micro.units, dtype=torch.bool)
    filler_U[list(units)] = True
    filler_masks = {"tok": filler_U[micro.unit_N], "seq": filler_U[micro.unit_B], "unit": filler_U}
    for level in ("tok", "seq", "unit"):
        for name, values in list(getattr(micro, level).items()):
            if name.startswith(WEIGHT):
                micro = micro.with_column(level, name, values.masked_fill(filler_masks[level], 0.0), over=None)
    return micro.with_column("unit", FILLER, filler_U)


def lend(loans: Iterable[Lent], roles: Mapping[str, Role]) -> None:
    """Send each lent head once to the role that computes with it: by reference inside this process, otherwise through
    the launcher's store."""
    for loan in loans:
        heads = list(roles[loan.role].group.stream("lend_head", roles[loan.role].view))
        if len(heads) != 1:
            raise TrainingError(f"role {loan.role!r} lent {len(heads)} output heads; its trainer must give one")
        roles[loan.borrower].every("borrow_head", loan.role, heads[0])
