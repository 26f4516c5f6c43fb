"""The conformance suite of losses.

::

    from rlhf_testing.loss import LossContract

    class TestMyLoss(LossContract):
        loss = MyLoss

        def statement(self, x_BT):          # the formula again, plain and slow, on padded [B, T] tensors
            nll_BT = -x_BT["logprobs"] * x_BT.mask_BT
            return nll_BT.sum() / x_BT.mask_BT.sum()
"""

from __future__ import annotations

import copy
import inspect
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from rlhf.interfaces.loss import Loss
from rlhf.ops.heads import BUILTIN
from rlhf.ops.loss_value import finish_sums
from rlhf.types import Head
from torch import Tensor

from rlhf_testing import fabricate
from rlhf_testing.compare import (
    GRADIENT,
    LOSS,
    distance,
    finite,
    generators_left_alone,
    layouts,
    norm,
    same_bits,
)
from rlhf_testing.contract import Nonconformance, expect, missing
from rlhf_testing.loss_case import EXTREME, LEAF, LossCase, LossSubject, Padded
from rlhf_testing.options import check_options

CHUNK = 3
"""Tokens per chunk. Trainers use thousands."""
STEP = 0.01
"""Change of outputs that shows whether the loss reads them."""
TOLERANCE = 1e-5
"""Relative to the largest value. A matrix product of fewer rows adds in a different order."""


class Declared(dict[str, Any]):
    """A head's columns. Reading a column that the head does not declare fails with the column's name."""

    def __init__(self, head: Head, values: Mapping[str, Any]) -> None:
        super().__init__(values)
        self._head = head

    def __missing__(self, name: str) -> Any:
        raise Nonconformance(
            f"head {self._head.name!r} reads the column {name!r}; it declares {list(self._head.columns)}: set "
            f"Head(..., columns=({name!r},))"
        )


def check_declared(label: str, loss: Loss, second: Loss) -> None:
    """Checks that the declarations are tuples of names and Heads, each once, and equal in another instance."""
    for method in ("outputs", "columns"):
        declaration = getattr(loss, method)()
        expect(
            isinstance(declaration, tuple | list),
            f'{label} {method}() returns {declaration!r:.60}; it must be a tuple, even of one name: ("logprobs",)',
        )
    heads = [output for output in loss.outputs() if isinstance(output, Head)]
    names = Counter(output.name if isinstance(output, Head) else output for output in loss.outputs())
    for name, count in names.items():
        expect(count == 1, f"{label} outputs() names {name!r} {count} times, but x[{name!r}] holds only one of them")
    for head in heads:
        is_new = head.name not in BUILTIN or head.fn is BUILTIN[head.name].fn
        expect(is_new, f"{label} a custom head has the name of the built-in head {head.name!r}: choose another name")
    fns = {output.name: output.fn for output in second.outputs() if isinstance(output, Head)}
    for head in heads:
        expect(
            fns.get(head.name) is head.fn or fns.get(head.name) == head.fn,
            f"{label} the function of head {head.name!r} is a new one in each call of outputs(): define it once, "
            "outside outputs() (a function made inside is new in every call and cannot be pickled)",
        )
    declared, other = ([f(instance) for f in _PARTS] for instance in (loss, second))
    expect(declared == other, f"{label} outputs(), columns() and reduce() must be functions of the config alone")


_PARTS = (lambda loss: loss.outputs(), lambda loss: loss.columns(), lambda loss: loss.reduce())


def check_head(label: str, case: LossCase, head: Head) -> None:
    """Checks a head of the loss's own: one row of float32 values per token, which depends on that token alone."""
    label = f"{label} head {head.name!r}"
    try:
        inspect.signature(head.fn).bind(None, None, None, None)
    except (TypeError, ValueError) as error:
        raise Nonconformance(f"{label} is called as fn(logits_CV, ids_C, columns, constants): {error}") from error
    batch = case.batch
    mask_N = batch.tok[head.over]
    inputs, ids = batch.tok[LEAF + head.name][mask_N].detach(), batch.ids_N[mask_N]
    columns = {name: batch.tok[name][mask_N] for name in head.columns}
    constants = {**head.constants, **{role: fabricate.output_head(role, case.seed) for role in head.lenders}}

    def values(rows: Sequence[int]) -> Tensor:
        rows_T = torch.tensor(rows)
        chunk = inputs[rows_T]
        version, declared = chunk._version, Declared(head, {k: v[rows_T] for k, v in columns.items()})
        chunk_values = head.fn(chunk, ids[rows_T], declared, constants)
        right = isinstance(chunk_values, Tensor) and chunk_values.ndim >= 1 and chunk_values.shape[0] == len(rows)
        shape = tuple(chunk_values.shape) if isinstance(chunk_values, Tensor) else type(chunk_values).__name__
        expect(right, f"{label} must give [{len(rows)}, ...] for {len(rows)} tokens, got {shape}: keep the token axis")
        expect(chunk._version == version, f"{label} changes its input in place, which other heads read: .clone() it")
        return chunk_values

    order = list(range(len(ids)))
    values_N = values(order)
    low = values_N.is_floating_point() and torch.finfo(values_N.dtype).bits < 32
    expect(not low, f"{label} gives {values_N.dtype}: its input is float32, so its values must be float32")
    bad = int((~torch.isfinite(values_N.float())).sum())
    expect(not bad, f"{label} gives {bad} values that are not finite, for ordinary input between -3 and 3")
    expect(same_bits(values_N, values(order)), f"{label} must be pure: its second call gives different values")
    chunks = torch.cat([values(order[i : i + CHUNK]) for i in range(0, len(order), CHUNK)])
    delta = float((chunks.double() - values_N.double()).abs().max())
    expect(
        delta <= TOLERANCE * max(1e-12, float(values_N.double().abs().max())),
        f"{label} depends on which tokens share a chunk (by {delta:.1e}): it is called chunk by chunk, so a value may "
        "depend only on its own token; put values that depend on the batch into a column (Loss.prepare)",
    )


class LossContract(LossSubject):
    """Checks a loss without a model: the model outputs are leaf tensors, and gradients are taken with respect to
    them."""

    def case(self, config: Any, seed: int = 0, **options: Any) -> LossCase:
        """An optimizer batch with leaf outputs for one config."""
        try:
            return LossCase(self, self.build(config), seed, **options)
        except Exception as error:
            raise Nonconformance(f"{self.label(config)} {type(error).__name__}: {error}") from error

    def cases(self) -> Iterable[tuple[Any, LossCase]]:
        for config in self.grid():
            yield config, self.case(config)

    # ------------------------------------------------------------------------------------- checks

    def test_declared_needs(self) -> None:
        """The declared outputs, columns and terms suffice for every config, and the call is pure."""
        for config, case in self.cases():
            label = self.label(config)
            columns_before = {k: v.clone() for k, v in case.batch.tok.items()}
            state = copy.deepcopy(case.loss.state_dict())
            with generators_left_alone(label):
                first, second = case.run(case.single_micro_batch()), case.run(case.single_micro_batch())
            expect(math.isfinite(first.total), f"{label} the loss is {first.total} on ordinary values")
            expect(first.total == second.total, f"{label} two calls on the same input give different values")
            expect(state == case.loss.state_dict(), f"{label} a call changed the loss's state: __call__ must be pure")
            for name, old in columns_before.items():
                expect(same_bits(old, case.batch.tok[name]), f"{label} the call changed the column {name!r} in place")

    def test_heads(self) -> None:
        """Outputs and columns are tuples that name each item once. A head of the loss's own returns float32 values, and
        each value depends on its own token only."""
        for config in self.grid():
            label, loss = self.label(config), self.build(config)
            check_declared(label, loss, self.build(config))
            case = self.case(config)
            for head in case.heads:
                if head.name not in BUILTIN and head.over != "last_token":
                    check_head(label, case, head)

    def test_masked_positions(self) -> None:
        """NaN and changed token ids at masked positions change no result, bit for bit."""
        for config, case in self.cases():
            label = self.label(config)
            clean, poisoned = case.run(case.single_micro_batch()), case.run(case.single_micro_batch(), poison=True)
            expect(
                same_bits(torch.tensor(clean.total), torch.tensor(poisoned.total)),
                f"{label} NaN at masked positions changes the loss from {clean.total!r} to {poisoned.total!r}: "
                "read tokens through x[...], which holds only those under the mask",
            )
            for name, gradient in clean.gradients.items():
                expect(
                    same_bits(gradient, poisoned.gradients[name]),
                    f"{label} NaN at masked positions changes the gradient of {name!r}",
                )
            prepared = case.prepare(poison=True)
            for name, values in case.batch.tok.items():
                expect(
                    same_bits(values, prepared.tok[name]),
                    f"{label} prepare() reads masked positions: column {name!r} depends on the values there",
                )

    def test_split_invariance(self) -> None:
        """Loss, gradients and metrics do not depend on micro-batches, packing order or ranks."""
        for config in self.grid():
            label, case = self.label(config), self.case(config)
            one_call = case.run(case.single_micro_batch())
            for layout, parts in layouts(case.batch.units).items():
                # this layout changes the order of the units in the batch, the others only the micro-batches
                if layout == "reversed packing order":
                    other = self.case(config, order=parts[0]).run(case.single_micro_batch())
                else:
                    other = case.run(parts)
                difference = abs(one_call.total - other.total)
                expect(
                    difference <= LOSS * one_call.size,
                    f"{label} split as {layout!r} changes the loss from {one_call.total:.9g} to {other.total:.9g} "
                    f"({difference / max(one_call.size, 1e-30):.1e} of sum |w x|, allowed {LOSS:.0e}). Return plain "
                    "values, without a mean or a count over this micro-batch, and declare reduce() instead",
                )
                delta = distance(one_call.gradients, other.gradients)
                expect(
                    delta <= GRADIENT,
                    f"{label} split as {layout!r} changes the gradient by {delta:.1e}, allowed {GRADIENT:.0e}",
                )
                self._same_metrics(label, layout, one_call.sums, other.sums)

    def _same_metrics(self, label: str, layout: str, a: Any, b: Any) -> None:
        expect(set(a) == set(b), f"{label} split as {layout!r} reports different metrics: {sorted(set(a) ^ set(b))}")
        values, split = finish_sums(a), finish_sums(b)
        for name in values:
            if name == "loss" or name.startswith("loss/"):
                continue
            allowed = 1e-4 * max(abs(values[name]), abs(split[name]), 1e-3)
            expect(
                abs(values[name] - split[name]) <= allowed,
                f"{label} metric {name!r} is {values[name]:.6g} for the whole batch and {split[name]:.6g} split as "
                f"{layout!r}: return values per token, sequence or unit",
            )

    def test_finite(self) -> None:
        """Log-ratios of +-1e4, huge values and sequences without tokens give finite losses, gradients and metrics."""
        for config in self.grid():
            for name, extreme in EXTREME.items():
                label = f"{self.label(config)} with {name}"
                case = self.case(config, extreme=extreme)
                run = case.run(case.single_micro_batch())
                expect(run.total == run.total and abs(run.total) != float("inf"), f"{label} the loss is {run.total}")
                bad = finite(run.gradients)
                expect(not bad, f"{label} the gradient of {bad} is not finite: bound the log-ratio before exp()")
                wrong = [k for k, v in finish_sums(run.sums).items() if not abs(v) < float("inf")]
                expect(not wrong, f"{label} the metrics {wrong} are not finite")
            self._empty(config)

    def _empty(self, config: Any) -> None:
        """A micro-batch in which no token is under the mask: zero loss, zero gradient, nothing divided by zero."""
        label, case = self.label(config), self.case(config)
        run = case.run([[case.batch.units - 1]])
        expect(run.total == 0.0, f"{label} a micro-batch without tokens under the mask has loss {run.total}, not 0")
        bad = finite(run.gradients)
        expect(
            not bad, f"{label} a micro-batch without tokens under the mask gives a gradient that is not finite: {bad}"
        )

    def test_gradient_reaches(self) -> None:
        """At least one config gives a gradient that is not zero, and none detaches whole units: where no gradient
        reaches a unit's outputs, they do not change the loss either."""
        cases = list(self.cases())
        runs = [case.run(case.single_micro_batch()) for _, case in cases]
        expect(
            any(norm(run.gradients) > 0 for run in runs),
            f"{self.label()} no gradient reaches any model output: is something detached?",
        )
        for (config, case), run in zip(cases, runs, strict=True):
            for unit in case.units_without(run.gradients) if norm(run.gradients) > 0 else ():
                with case.moved(unit, STEP):
                    change = abs(case.run(case.single_micro_batch()).total - run.total)
                expect(
                    change <= 10 * LOSS * run.size,
                    f"{self.label(config)} other outputs of the model in one unit change the loss by {change:.2g}, but "
                    "no gradient reaches them: is a part of the loss detached?",
                )

    def test_signal(self) -> None:
        """Without the columns of ``signal()`` no unit has a value or a gradient: such units are not computed."""
        for config in self.grid():
            label, case = self.label(config), self.case(config)
            names = case.loss.signal()
            if not names:
                continue
            unknown = [name for name in names if name not in case.loss.columns()]
            expect(not unknown, f"{label} signal() names {unknown}; columns() declares only {case.loss.columns()}")
            for name in names:
                case.batch = case.batch.with_column(case.level(name), name, torch.zeros_like(case.batch.column(name)))
            run = case.run(case.single_micro_batch())
            reached = sorted(output for output, gradient in run.gradients.items() if bool(gradient.any()))
            expect(
                run.size == 0 and not reached,
                f"{label} signal() names {', '.join(names)}, but where these columns are 0 the loss is "
                f"{run.total:.6g}, with a gradient of {', '.join(reached) or 'nothing'}: the loss needs every unit, "
                "so signal() must return ()",
            )

    def test_options(self) -> None:
        """Each option that a config sets changes the loss or its gradient."""

        def effect(config: Any) -> Any:
            cases = [self.case(config, seed) for seed in range(3)]
            runs = [case.run(case.single_micro_batch()) for case in cases]
            return [(r.total, {name: g for name, g in r.gradients.items() if bool(g.any())}) for r in runs]

        check_options(self, effect)

    def test_statement(self) -> None:
        """Loss and gradient equal the author's plain statement on padded [B, T] tensors."""
        if type(self).statement is LossContract.statement:
            raise missing(
                "statement(self, x_BT): the loss written plainly on padded [B, T] tensors. No other check detects "
                "a wrong formula, or a factor that should be detached but is not"
            )
        for config in self.grid():
            label, case = self.label(config), self.case(config, fresh=False)
            run = case.run(case.single_micro_batch())
            x_BT = Padded(case, config)
            expected = self.statement(x_BT)
            gradients = case.gradients_of(expected)
            delta = distance(run.gradients, gradients)
            difference = abs(run.total - float(expected.detach()))
            expect(
                difference <= 10 * LOSS * max(run.size, 1e-12),
                f"{label} the loss is {run.total:.9g}, but the statement gives {float(expected.detach()):.9g}",
            )
            expect(
                delta <= GRADIENT,
                f"{label} the gradient differs from the statement's by {delta:.1e} (allowed {GRADIENT:.0e})",
            )

    def statement(self, x_BT: Padded) -> Tensor:
        """The whole loss as one scalar, written plainly on padded float64 tensors: no micro-batches, no weights."""
        raise NotImplementedError
