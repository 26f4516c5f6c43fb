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
import math
from collections.abc import Iterable
from typing import Any

import torch
from rlhf.ops.heads import BUILTIN
from rlhf.ops.loss_value import finish_sums
from torch import Tensor

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
from rlhf_testing.loss_case import EXTREME, LossCase, LossSubject, Padded
from rlhf_testing.loss_heads import check_declared, check_head
from rlhf_testing.options import check_options


class LossContract(LossSubject):
    """Checks a loss without a model: the model outputs are leaf tensors, and gradients are taken with respect to
    them."""

    def case(self, config: Any, seed: int = 0, **options: Any) -> LossCase:
        """An optimizer batch with leaf outputs for one config."""
        try:
            return LossCase(self, self.build(config), seed, **options)
        except Exception as error:
            raise Nonconformance(f"{self.about(config)} {type(error).__name__}: {error}") from error

    def cases(self) -> Iterable[tuple[Any, LossCase]]:
        for config in self.grid():
            yield config, self.case(config)

    # ------------------------------------------------------------------------------------- checks

    def test_declared_needs(self) -> None:
        """The declared outputs, columns and terms suffice for every config, and the call is pure."""
        for config, case in self.cases():
            about = self.about(config)
            before = {k: v.clone() for k, v in case.batch.tok.items()}
            state = copy.deepcopy(case.loss.state_dict())
            with generators_left_alone(about):
                first, second = case.run(case.whole()), case.run(case.whole())
            expect(math.isfinite(first.total), f"{about} the loss is {first.total} on ordinary values")
            expect(first.total == second.total, f"{about} two calls on the same input give different values")
            expect(state == case.loss.state_dict(), f"{about} calling the loss changed its state: __call__ is pure")
            for name, old in before.items():
                expect(same_bits(old, case.batch.tok[name]), f"{about} the call changed the column {name!r} in place")

    def test_heads(self) -> None:
        """Outputs and columns are tuples that name each item once. A head of the loss's own returns float32 values, and
        each value depends on its own token only."""
        for config in self.grid():
            about, loss = self.about(config), self.build(config)
            check_declared(about, loss, self.build(config))
            case = self.case(config)
            for head in case.heads:
                if head.name not in BUILTIN and head.over != "last_token":
                    check_head(about, case, head)

    def test_masked_positions(self) -> None:
        """NaN and changed token ids at masked positions change no result, bit for bit."""
        for config, case in self.cases():
            about = self.about(config)
            clean, poisoned = case.run(case.whole()), case.run(case.whole(), poison=True)
            expect(
                same_bits(torch.tensor(clean.total), torch.tensor(poisoned.total)),
                f"{about} NaN at masked positions changes the loss from {clean.total!r} to {poisoned.total!r}: "
                "read tokens through x[...], which holds only those under the mask",
            )
            for name, gradient in clean.gradients.items():
                expect(
                    same_bits(gradient, poisoned.gradients[name]),
                    f"{about} NaN at masked positions changes the gradient of {name!r}",
                )
            prepared = case.prepare(poison=True)
            for name, values in case.batch.tok.items():
                expect(
                    same_bits(values, prepared.tok[name]),
                    f"{about} prepare() reads masked positions: column {name!r} depends on what stands there",
                )

    def test_split_invariance(self) -> None:
        """Loss, gradients and metrics do not depend on micro-batches, packing order or ranks."""
        for config in self.grid():
            about, case = self.about(config), self.case(config)
            whole = case.run(case.whole())
            for layout, parts in layouts(case.batch.units).items():
                if layout == "reversed packing order":
                    other = self.case(config, order=parts[0]).run(case.whole())
                else:
                    other = case.run(parts)
                difference = abs(whole.total - other.total)
                expect(
                    difference <= LOSS * whole.size,
                    f"{about} split as {layout!r} changes the loss from {whole.total:.9g} to {other.total:.9g} "
                    f"({difference / max(whole.size, 1e-30):.1e} of sum |w x|, allowed {LOSS:.0e}). A loss returns "
                    "plain values: no mean, no count of this micro-batch; declare reduce() instead",
                )
                apart = distance(whole.gradients, other.gradients)
                expect(
                    apart <= GRADIENT,
                    f"{about} split as {layout!r} changes the gradient by {apart:.1e}, allowed {GRADIENT:.0e}",
                )
                self._same_metrics(about, layout, whole.sums, other.sums)

    def _same_metrics(self, about: str, layout: str, a: Any, b: Any) -> None:
        expect(set(a) == set(b), f"{about} split as {layout!r} reports other metrics: {sorted(set(a) ^ set(b))}")
        whole, split = finish_sums(a), finish_sums(b)
        for name in whole:
            if name == "loss" or name.startswith("loss/"):
                continue
            allowed = 1e-4 * max(abs(whole[name]), abs(split[name]), 1e-3)
            expect(
                abs(whole[name] - split[name]) <= allowed,
                f"{about} metric {name!r} is {whole[name]:.6g} for the whole batch and {split[name]:.6g} split as "
                f"{layout!r}: return values per token, sequence or unit",
            )

    def test_finite(self) -> None:
        """Log-ratios of +-1e4, huge values and sequences without tokens give finite losses, gradients and metrics."""
        for config in self.grid():
            for name, extreme in EXTREME.items():
                about = f"{self.about(config)} with {name}"
                case = self.case(config, extreme=extreme)
                run = case.run(case.whole())
                expect(run.total == run.total and abs(run.total) != float("inf"), f"{about} the loss is {run.total}")
                bad = finite(run.gradients)
                expect(not bad, f"{about} the gradient of {bad} is not finite: bound the log-ratio before exp()")
                wrong = [k for k, v in finish_sums(run.sums).items() if not abs(v) < float("inf")]
                expect(not wrong, f"{about} the metrics {wrong} are not finite")
            self._empty(config)

    def _empty(self, config: Any) -> None:
        """A micro-batch in which no token is under the mask: zero loss, zero gradient, nothing divided by zero."""
        about, case = self.about(config), self.case(config)
        run = case.run([[case.batch.units - 1]])
        expect(run.total == 0.0, f"{about} a micro-batch without tokens under the mask has loss {run.total}, not 0")
        bad = finite(run.gradients)
        expect(
            not bad, f"{about} a micro-batch without tokens under the mask gives a gradient that is not finite: {bad}"
        )

    def test_gradient_reaches(self) -> None:
        """At least one config gives a gradient that is not zero."""
        norms = [norm(case.run(case.whole()).gradients) for _, case in self.cases()]
        expect(
            any(n > 0 for n in norms), f"{self.about()} no gradient reaches any model output: is something detached?"
        )

    def test_signal(self) -> None:
        """Without the columns of ``signal()`` no unit has a value or a gradient: such units are not computed."""
        for config in self.grid():
            about, case = self.about(config), self.case(config)
            names = case.loss.signal()
            if not names:
                continue
            unknown = [name for name in names if name not in case.loss.columns()]
            expect(not unknown, f"{about} signal() names {unknown}, which columns() does not: {case.loss.columns()}")
            for name in names:
                case.batch = case.batch.with_column(case.level(name), name, torch.zeros_like(case.batch.column(name)))
            run = case.run(case.whole())
            reached = sorted(output for output, gradient in run.gradients.items() if bool(gradient.any()))
            expect(
                run.size == 0 and not reached,
                f"{about} signal() says {', '.join(names)}, but where these columns are 0 the loss is {run.total:.6g}, "
                f"with a gradient of {', '.join(reached) or 'nothing'}: it needs every unit, so signal() must give ()",
            )

    def test_options(self) -> None:
        """Each option that a config sets changes the loss or its gradient."""

        def effect(config: Any) -> Any:
            cases = [self.case(config, seed) for seed in range(3)]
            runs = [case.run(case.whole()) for case in cases]
            return [(r.total, {name: g for name, g in r.gradients.items() if bool(g.any())}) for r in runs]

        check_options(self, effect)

    def test_statement(self) -> None:
        """Loss and gradient equal the author's plain statement on padded [B, T] tensors."""
        if type(self).statement is LossContract.statement:
            raise missing("statement(self, x_BT): the loss written plainly on padded [B, T] tensors")
        for config in self.grid():
            about, case = self.about(config), self.case(config, fresh=False)
            run = case.run(case.whole())
            x_BT = Padded(case, config)
            stated = self.statement(x_BT)
            gradients = case.gradients_of(stated)
            apart = distance(run.gradients, gradients)
            difference = abs(run.total - float(stated.detach()))
            expect(
                difference <= 10 * LOSS * max(run.size, 1e-12),
                f"{about} the loss is {run.total:.9g}, the statement says {float(stated.detach()):.9g}",
            )
            expect(
                apart <= GRADIENT,
                f"{about} the gradient differs from the statement's by {apart:.1e} (allowed {GRADIENT:.0e})",
            )

    def statement(self, x_BT: Padded) -> Tensor:
        """The whole loss as one scalar, written plainly on padded float64 tensors: no micro-batches, no weights."""
        raise NotImplementedError
