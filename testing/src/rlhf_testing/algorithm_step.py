"""Runs one step of an algorithm as the controllers do, on tiny models, and keeps every gradient for the suite."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from rlhf.interfaces.loss import Loss
from rlhf.interfaces.model import ModelSpec
from rlhf.ops.batch import Batch
from rlhf.ops.heads import resolve_head
from rlhf.ops.loss_value import finish_sums, over_mask, required_columns
from rlhf.ops.reduce import weigh
from rlhf.types import Annotation, Snapshot, Update
from torch import Tensor

from rlhf_testing.compare import layouts
from rlhf_testing.contract import Nonconformance, expect
from rlhf_testing.plain import EmbeddingTrainer
from rlhf_testing.recording import Recording


@dataclass
class Learned:
    """The result of one optimizer batch of one update."""

    total: float
    size: float
    """``sum |weight * value|``."""
    gradients: dict[str, Tensor]


@dataclass
class Step:
    """The results of a step."""

    batch: Batch
    annotated: Batch
    """The batch before ``credit``."""
    credited: set[str]
    """Columns that ``credit`` added."""
    updates: list[Update | Snapshot]
    metrics: dict[str, float] = field(default_factory=dict)
    finished: dict[str, float] = field(default_factory=dict)
    runs: dict[str, Learned] = field(default_factory=dict)
    """The result of each update, by role and loss slot."""


def model_step(
    algorithm: Any,
    data: Sequence[Any],
    number: int,
    *,
    poison: bool = False,
    layout: str = "",
    annotated_as: Batch | None = None,
    end: bool = True,
) -> Step:
    """Assemble, annotate and credit a batch, and compute the gradient of every update.

    Args:
        poison: put NaN at masked positions of every float token column, before credit and before updates. The mask is
            that of the annotation, else ``loss_mask``.
        layout: how the optimizer batch is split (:func:`rlhf_testing.compare.layouts`); empty: one micro-batch.
        annotated_as: copy the annotations of each token from this batch, which holds the same samples after other
            prompts.
        end: whether to call ``finish``.
    """
    needs = algorithm.needs()
    # each role has other weights: between equal models a KL, for example, would be 0
    trainers = {
        role.name: EmbeddingTrainer(None, ModelSpec(role, "", seed=index + 1)) for index, role in enumerate(needs.roles)
    }
    for loan in needs.loans:
        [head] = _look_up(trainers, loan.role, "needs().loans names", "the roles are").lend_head()
        _look_up(trainers, loan.borrower, "needs().loans names", "the roles are").borrow_head(loan.role, head)
    assembled, counts = assemble(algorithm, data)
    if assembled is None:
        raise Nonconformance("assemble() returned no batch for data that can be learnt from")
    batch = assembled
    annotations = algorithm.annotations(number)
    batch = annotate(trainers, batch, annotations, "annotations()")
    over = {a.column: resolve_head(a.output).over for a in annotations}
    if annotated_as is not None:
        batch = same_annotations(batch, annotated_as, over)
    annotated = batch
    columns_before = {*batch.tok, *batch.seq, *batch.unit}
    if poison:
        batch = poisoned(batch, over)
    credited = algorithm.credit(batch)
    pair = isinstance(credited, tuple) and len(credited) == 2 and isinstance(credited[0], Batch)
    if not pair:  # formatting a batch takes as long as the step
        raise Nonconformance(f"credit() must return (batch, metrics), got {_text(credited)}")
    batch, metrics = credited
    updates = algorithm.updates(number, batch)
    is_list = isinstance(updates, list | tuple) and all(isinstance(u, Update | Snapshot) for u in updates)
    expect(is_list, f"updates() must return a list of Updates and Snapshots, got {_text(updates)}")
    columns = {*batch.tok, *batch.seq, *batch.unit}
    step = Step(batch, annotated, columns - columns_before, list(updates), {**counts, **metrics})
    for update in step.updates:
        if isinstance(update, Snapshot):
            continue
        loss: Loss = _look_up(algorithm.parts, update.loss, "updates() names the loss slot", "the parts are")
        trainer = _look_up(trainers, update.role, "updates() trains", "needs() declares")
        learned, sums = learn(trainer, trainers, loss, update, poisoned(batch, over) if poison else batch, layout)
        step.runs[f"{update.role}/{update.loss}"] = learned
        step.metrics |= {f"{update.role}/{name}": value for name, value in sums.items()}
    if not end:
        return step
    finished = algorithm.finish(number, assembled, step.metrics)
    expect(
        isinstance(finished, Mapping), f"finish() must return metrics ({{}} if there are none), got {_text(finished)}"
    )
    step.finished = dict(finished)
    return step


def assemble(algorithm: Any, data: Sequence[Any]) -> tuple[Batch | None, dict[str, float]]:
    """Returns the result of ``assemble``. Fails if its form is wrong."""
    result = algorithm.assemble(data)
    pair = isinstance(result, tuple) and len(result) == 2
    fits = pair and (result[0] is None or isinstance(result[0], Batch)) and isinstance(result[1], Mapping)
    if not fits:
        text = _text(result)
        raise Nonconformance(
            f"assemble() must return (batch, metrics), with batch = None if there is nothing to learn from, got {text}"
        )
    return result[0], dict(result[1])


def annotate(trainers: dict[str, Any], batch: Batch, annotations: Sequence[Annotation], method: str) -> Batch:
    """Writes each annotation's output of a role into its column. Fails for an undeclared role or an unknown view."""
    for a in annotations:
        trainer = _look_up(trainers, a.role, f"{method} reads the role", "needs() declares")
        expect(a.view in ("live", "ema", "base"), f"{method} asks for the view {a.view!r}; allowed: live, ema, base")
        head = resolve_head(a.output)
        needed = {"temperature", head.over, *head.columns}
        values = trainer.forward([batch.select_columns(sorted(needed))], [head])[0][head.name]
        if head.over == "last_token":
            batch = batch.with_column("seq", a.column, values)
        else:
            batch = batch.with_column("tok", a.column, values, over=head.over)
    return batch


def same_annotations(batch: Batch, other: Batch, over: Mapping[str, str]) -> Batch:
    """``batch`` with the annotations of ``other``, copied token by token under the mask of each annotation. An
    annotation over tokens that the policy did not sample is not changed."""
    for name, mask in over.items():
        if mask == "last_token":
            batch = batch.with_column("seq", name, other.seq[name])
        elif int(batch.tok[mask].sum()) == int(other.tok[mask].sum()):
            values_N = torch.zeros((batch.tokens, *other.tok[name].shape[1:]), dtype=other.tok[name].dtype)
            values_N[batch.tok[mask]] = other.tok[name][other.tok[mask]]
            batch = batch.with_column("tok", name, values_N, over=mask)
    return batch


def learn(
    trainer: Any, trainers: dict[str, Any], loss: Loss, update: Update, batch: Batch, layout: str
) -> tuple[Learned, dict[str, float]]:
    """The gradient of the whole batch as one optimizer step. The model gets only the declared columns."""
    expect(
        update.minibatches <= batch.units and update.epochs >= 1,
        f"the Update has {update.minibatches} minibatches and {update.epochs} epochs for {batch.units} units; use at "
        "most one minibatch per unit, and at least 1 epoch",
    )
    batch = annotate(trainers, batch, loss.prepass(), f"prepass() of loss {loss.name!r}")
    batch = weigh(loss.prepare(batch), loss.reduce())
    heads = [resolve_head(o, over_mask(loss)) for o in loss.outputs()]
    slim = batch.select_columns(required_columns(loss, heads))
    parts = layouts(batch.units)[layout] if layout else [list(range(batch.units))]
    trainer.zero_grad()
    recording = Recording(loss)
    sums = trainer.accumulate([slim.select(p) for p in parts], recording, update.coef, update.live)
    gradients = {k: v.clone() for k, v in trainer.gradients().items()}
    trainer.zero_grad()
    return Learned(sums["loss"][0], recording.size, gradients), finish_sums(sums)


def poisoned(batch: Batch, over: Mapping[str, str]) -> Batch:
    """The batch with NaN at masked positions of every float token column except the temperature. ``over`` holds the
    mask names of columns whose mask is not ``loss_mask``."""
    tok = {}
    for name, values in batch.tok.items():
        mask_N = batch.tok[over.get(name, "loss_mask")]
        where_N = mask_N.view(-1, *[1] * (values.ndim - 1))
        spoil = values.is_floating_point() and name != "temperature"
        tok[name] = torch.where(where_N, values, torch.full_like(values, float("nan"))) if spoil else values
    return replace(batch, tok=tok)


def _text(value: Any) -> str:
    return f"{type(value).__name__} {value!r:.60}"


def _look_up(table: dict[str, Any], name: str, claim: str, listing: str) -> Any:
    if name not in table:
        raise Nonconformance(f"{claim} {name!r}, but {listing} {sorted(table)}")
    return table[name]
