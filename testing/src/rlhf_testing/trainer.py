"""The conformance suite of trainers.

::

    from rlhf_testing.trainer import TrainerContract

    class TestMyTrainer(TrainerContract):
        trainer = MyTrainer
        architectures = ("qwen3", "llama")

Every result is compared with :class:`rlhf_testing.plain.PlainTrainer`, in fp32, on tiny models that the suite makes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rlhf.errors import ModelError
from rlhf.interfaces.loss import Loss
from rlhf.interfaces.model import ModelSpec
from rlhf.interfaces.trainer import LendsHead
from rlhf.ops.heads import resolve_head
from rlhf.ops.loss_value import finish_sums
from rlhf.ops.reduce import weigh
from rlhf.types import RoleSpec
from torch import Tensor

from rlhf_testing import fabricate
from rlhf_testing.compare import GRADIENT, distance, layouts, same_bits
from rlhf_testing.contract import Contract, expect
from rlhf_testing.models import model_path
from rlhf_testing.optimizer_batch import columns, learned, optimizer_batch, slim_batch
from rlhf_testing.plain import PlainTrainer
from rlhf_testing.suite_losses import MARGIN, ContextLoss, LentLoss, ScoreLoss, TokenLoss, ValueLoss
from rlhf_testing.trainer_state import TrainerStateChecks, weights_of

OUTPUT = 1e-5
"""Allowed absolute difference of log-probs, entropies and values of size 1, for fp32 matrix products in another
order."""

HEADS: tuple[tuple[str, tuple[Any, ...], type[Loss]], ...] = (
    ("lm", ("logprobs", "entropy", MARGIN, "hidden"), TokenLoss),
    ("scalar", ("values", "scores", "hidden"), ValueLoss),
)
"""(head, outputs to compare, loss to train with)."""

TRAINED: tuple[tuple[str, type[Loss]], ...] = (("lm", ContextLoss), ("scalar", ValueLoss), ("scalar", ScoreLoss))
"""(head, loss) whose gradients are compared."""


class TrainerContract(TrainerStateChecks, Contract):
    """Compares forward and backward with one sequence at a time; checks state, weights and export."""

    kind = "trainer"
    trainer: Any = None
    architectures: Sequence[str] = ("qwen3",)
    """Model types of transformers to check."""

    def make(
        self, config: Any, *, head: str = "lm", trained: bool = True, path: Path | None = None, **spec: Any
    ) -> Any:
        """A trainer with one rank on a tiny model. Override it if the trainer needs more setup."""
        architecture = spec.pop("architecture", self.architectures[0])
        path = path or model_path(architecture, head)
        options = {"dtype": "fp32", "seed": 3, "total_updates": 10, **spec}
        return self.cls(config, ModelSpec(RoleSpec("policy", head, trained), str(path), **options))

    def plain(self, head: str = "lm", path: Path | None = None, architecture: str = "") -> PlainTrainer:
        path = path or model_path(architecture or self.architectures[0], head)
        return PlainTrainer(None, ModelSpec(RoleSpec("policy", head, True), str(path)))

    def build(self, config: Any) -> Any:
        return self.make(config)

    # ------------------------------------------------------------------------------------- checks

    def test_forward(self) -> None:
        """Outputs equal those of one sequence at a time, at each token's own temperature; zero where masked."""
        for config in self.grid():
            for architecture in self.architectures:
                for head, outputs, _ in HEADS:
                    label = f"{self.label(config)} {architecture} with head {head!r}:"
                    batch = columns(fabricate.batch(1))
                    plain = self.plain(head, architecture=architecture).forward([batch], outputs)[0]
                    results = self.make(config, head=head, trained=False, architecture=architecture).forward(
                        [batch], outputs
                    )
                    expect(len(results) == 1, f"{label} forward() of one micro-batch gives {len(results)} results")
                    for name, want in plain.items():
                        same_output(results[0][name], want, f"{label} {name!r}")
                    for output in outputs:
                        h = resolve_head(output)
                        if h.over == "last_token":
                            continue
                        masked = results[0][h.name][~batch.tok[h.over]]
                        expect(bool((masked == 0).all()), f"{label} {h.name!r} must be 0 where {h.over!r} is False")

    def test_frozen_head(self) -> None:
        """``check_files`` and the constructor refuse a language model for a frozen role with a scalar head, because the
        head would be random."""
        path = model_path(self.architectures[0], "lm")
        spec = ModelSpec(RoleSpec("policy", "scalar"), str(path))
        ways = {
            "check_files()": lambda config: self.cls.check_files(spec),
            "the constructor": lambda config: self.make(config, head="scalar", trained=False, path=path),
        }
        for config in self.grid():
            for name, way in ways.items():
                try:
                    way(config)
                except ModelError:
                    continue
                expect(False, f"{self.label(config)} {name} accepts a language model for a scalar role that is not "
                              "trained: its head would be random. Raise ModelError")  # fmt: skip

    def test_new_head(self) -> None:
        """A scalar head that the files of a language model lack depends on the spec only, so that runs with equal seeds
        are equal."""
        path, batch = model_path(self.architectures[0], "lm"), columns(fabricate.batch(1))
        for config in self.grid():
            values = []
            for state in (1, 2):
                with torch.random.fork_rng(devices=[]):
                    torch.manual_seed(state)
                    trainer = self.make(config, head="scalar", path=path)
                values.append(trainer.forward([batch], ("values",))[0]["values"])
            expect(
                torch.equal(*values),
                f"{self.label(config)} a new scalar head depends on torch's global random state; draw it from "
                "spec.seed (rlhf.seeds.derive_seed)",
            )

    def test_packing(self) -> None:
        """Packed sequences do not attend to each other: together, alone and in any order they give the same outputs."""
        for config in self.grid():
            for architecture in self.architectures:
                label = f"{self.label(config)} {architecture}:"
                trainer = self.make(config, trained=False, architecture=architecture)
                batch = columns(fabricate.batch(2, units=5))
                logprobs = trainer.forward([batch], ("logprobs",))[0]["logprobs"]
                packed = batch.with_column("tok", "whole", logprobs, over=None)
                for layout, parts in layouts(batch.units).items():
                    micros = [batch.select(p) for p in parts]
                    for part, outputs in zip(parts, trainer.forward(micros, ("logprobs",)), strict=True):
                        want = packed.select(part).tok["whole"]
                        same_output(outputs["logprobs"], want, f"{label} log-probs {layout!r} against packed together")

    def test_gradients(self) -> None:
        """Gradients and losses equal those of one sequence at a time, and add up over micro-batches and calls."""
        for config in self.grid():
            for architecture in self.architectures:
                for head, loss in TRAINED:
                    label = f"{self.label(config)} {architecture}, {loss.name}:"
                    batch, loss_instance = optimizer_batch(loss()), loss()
                    one_call = [list(range(batch.units))]
                    want, want_sums, size = learned(
                        self.plain(head, architecture=architecture), batch, loss_instance, [one_call]
                    )
                    trainer = self.make(config, head=head, architecture=architecture)
                    ways = {name: [parts] for name, parts in layouts(batch.units).items()}
                    ways |= {"one call per unit": [[[u]] for u in range(batch.units)], "packed together": [one_call]}
                    for way, calls in ways.items():
                        gradients, sums, _ = learned(trainer, batch, loss_instance, calls)
                        delta = _gradient_distance(gradients, want)
                        expect(
                            delta <= GRADIENT,
                            f"{label} {way}: the gradient differs from the plain one by {delta:.1e} "
                            f"(allowed {GRADIENT:.0e}). Sum gradients: no mean over micro-batches, calls or ranks",
                        )
                        for name, value in want_sums.items():
                            expect(
                                abs(sums.get(name, float("nan")) - value) <= 1e-5 * max(size, abs(value)),
                                f"{label} {way}: {name!r} is {sums.get(name)}, but {value} by the plain computation",
                            )

    def test_lent_head(self) -> None:
        """A role computes with the output head of another, wider model, from hidden states that the other model gave
        (``LendsHead``). The role also has a head of its own."""
        if not issubclass(self.cls, LendsHead):
            return
        for config in self.grid():
            for architecture in self.architectures:
                label, loss = f"{self.label(config)} {architecture}, {LentLoss.name}:", LentLoss()
                path = model_path(architecture, seed=7, hidden=48, tied=False)
                trainer = self.make(config, architecture=architecture)
                lender = self.make(config, path=path, trained=False)
                plain, plain_lender = self.plain(architecture=architecture), self.plain(path=path)
                base = fabricate.batch(4)
                results = []
                for borrower, source in ((plain, plain_lender), (trainer, lender)):
                    hidden = source.forward([base], ("hidden",))[0]["hidden"]
                    batch = weigh(base.with_column("tok", "lent_hidden", hidden), loss.reduce())
                    for head in source.lend_head():
                        borrower.borrow_head("lender", head)
                    calls = [[[u] for u in range(base.units)], [list(range(base.units))]]
                    results.append(learned(borrower, batch, loss, [calls[borrower is plain]]))
                (want, want_sums, _), (gradients, sums, _) = results
                expect(
                    abs(sums["loss"] - want_sums["loss"]) <= 1e-5 * abs(want_sums["loss"]),
                    f"{label} the loss is {sums['loss']}, but {want_sums['loss']} by the plain computation",
                )
                delta = _gradient_distance(gradients, want)
                expect(delta <= GRADIENT, f"{label} the gradient differs from the plain one by {delta:.1e}")

    def test_masked_positions(self) -> None:
        """NaN at masked positions of the columns changes no output and no gradient, bit for bit."""
        for config in self.grid():
            label, loss = self.label(config), TokenLoss()
            batch, trainer = optimizer_batch(loss), self.make(config)
            poisoned = batch
            for name, values in batch.tok.items():
                if values.is_floating_point():
                    nan = torch.where(batch.tok["loss_mask"], values, torch.full_like(values, float("nan")))
                    poisoned = replace(poisoned, tok={**poisoned.tok, name: nan})
            one_call = [[list(range(batch.units))]]
            clean, sums, _ = learned(trainer, batch, loss, one_call)
            spoilt, spoilt_sums, _ = learned(trainer, poisoned, loss, one_call)
            expect(sums == spoilt_sums, f"{label} NaN at masked positions changes the sums: {sums} and {spoilt_sums}")
            for name, gradient in clean.items():
                expect(
                    same_bits(gradient, spoilt[name]),
                    f"{label} NaN at masked positions changes the gradient of {name!r}",
                )
            a, b = (trainer.forward([x], ("logprobs",))[0]["logprobs"] for x in (batch, poisoned))
            expect(same_bits(a, b), f"{label} NaN at masked positions changes the log-probs")

    def test_every_parameter_learns(self) -> None:
        """A gradient that is not zero reaches every parameter."""
        for config in self.grid():
            for head, _, loss in HEADS:
                batch = optimizer_batch(loss())
                gradients, _, _ = learned(self.make(config, head=head), batch, loss(), [[list(range(batch.units))]])
                plain, _, _ = learned(self.plain(head), batch, loss(), [[list(range(batch.units))]])
                silent = sorted(
                    n for n, g in plain.items() if bool(g.any()) and not (n in gradients and bool(gradients[n].any()))
                )
                expect(not silent, f"{self.label(config)} head {head!r}: no gradient reaches {silent}: is it frozen?")

    def test_evaluates_without_dropout(self) -> None:
        """``evaluate`` disables dropout: its loss equals the loss of the outputs of ``forward``."""
        loss = TokenLoss()
        path = model_path(self.architectures[0], attention_dropout=0.5)
        plain = self.plain(path=path).evaluate([slim_batch(optimizer_batch(loss), loss)], loss, {}, {})
        for config in self.grid():
            sums = self.make(config, path=path).evaluate([slim_batch(optimizer_batch(loss), loss)], loss, {}, {})
            want, value = finish_sums(plain)["loss"], finish_sums(sums)["loss"]
            expect(
                abs(value - want) <= 1e-5 * max(1.0, abs(want)),
                f"{self.label(config)} evaluate() of a model with dropout gives {value}, but {want} without dropout",
            )

    def test_evaluate(self) -> None:
        """``evaluate`` returns the sums of ``accumulate`` and does not change weights and gradients."""
        for config in self.grid():
            label, loss = self.label(config), TokenLoss()
            batch, trainer = optimizer_batch(loss), self.make(config)
            weights = weights_of(trainer)
            slim = slim_batch(batch, loss)
            sums = finish_sums(trainer.evaluate([slim], loss, {}, {}))
            for name, weight in weights_of(trainer).items():
                expect(same_bits(weights[name], weight), f"{label} evaluate() changed the weight {name!r}")
            _, want, _ = learned(trainer, batch, loss, [[list(range(batch.units))]])
            for name, value in want.items():
                expect(
                    abs(sums[name] - value) <= 1e-5 * max(1.0, abs(value)),
                    f"{label} evaluate() gives {name} = {sums[name]}, but accumulate() gives {value}",
                )


def _gradient_distance(gradients: Mapping[str, Tensor], plain: Mapping[str, Tensor]) -> float:
    """Their :func:`distance`. A trainer may leave out parameters that no gradient reaches."""
    full = {**{k: torch.zeros_like(v) for k, v in plain.items()}, **gradients}
    return distance(full, {**{k: torch.zeros_like(v) for k, v in full.items()}, **plain})


def same_output(output: Tensor, want: Tensor, label: str) -> None:
    """Fails unless both have the same shape and are equal within :data:`OUTPUT`, and ``output`` is fp32 on the CPU."""
    expect(output.shape == want.shape, f"{label} has shape {tuple(output.shape)}, it must be {tuple(want.shape)}")
    expect(
        output.dtype == torch.float32 and output.device.type == "cpu",
        f"{label} must be fp32 on the CPU, got {output.dtype}",
    )
    delta = float((output - want).abs().max()) if want.numel() else 0.0
    expect(
        delta <= OUTPUT * max(1.0, float(want.abs().max())), f"{label} differs by {delta:.1e} (allowed {OUTPUT:.0e})"
    )
