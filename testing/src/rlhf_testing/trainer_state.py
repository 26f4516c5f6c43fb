"""The trainer suite's checks of steps, state, weights, export and skipped steps."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from rlhf.interfaces import HasViews, Offloads, SendsWeights, TakesWeights
from safetensors.torch import load_file
from torch import Tensor

from rlhf_testing import fabricate
from rlhf_testing.compare import same_bits
from rlhf_testing.contract import expect
from rlhf_testing.optimizer_batch import columns, optimizer_batch, slim_batch
from rlhf_testing.suite_losses import InfiniteGradient, InfiniteLoss, TokenLoss

PICKLES = (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05", b"PK\x03\x04")
"""First bytes of pickles, and of the zip archives in which torch.save stores them."""


class TrainerStateChecks:
    """A mixin of :class:`rlhf_testing.trainer.TrainerContract`, which defines the members that are declared here."""

    cls: Any
    make: Any
    plain: Any
    grid: Any
    label: Any

    def test_step(self) -> None:
        """``apply`` changes the weights, reports a finite norm and clears the gradients. Repeated runs are
        bit-equal."""
        for config in self.grid():
            label = self.label(config)
            trainer, twin = self.make(config), self.make(config)
            weights = weights_of(trainer)
            results = [step(t, n) for n in range(2) for t in (trainer, twin)]
            expect(
                results[0] == results[1] and results[2] == results[3],
                f"{label} two equal trainers report different steps: {results}",
            )
            expect(
                not results[0].skipped and 0 < results[0].grad_norm < float("inf"),
                f"{label} the first step gives {results[0]}",
            )
            same_weights(weights_of(trainer), weights_of(twin), f"{label} two equal trainers, after two equal steps:")
            moved = [n for n, v in weights_of(trainer).items() if not same_bits(v, weights[n])]
            expect(
                bool(moved),
                f"{label} two steps changed no weight (learning rate {results[0].lr}, then {results[2].lr})",
            )
            expect(
                all(not bool(g.any()) for g in trainer.gradients().values()),
                f"{label} gradients are not cleared after apply(): the next step would add to them",
            )

    def test_state(self) -> None:
        """``save`` and ``load`` are exact: the next step after a restore equals the uninterrupted one, bit for bit."""
        for config in self.grid():
            label, trainer = self.label(config), self.make(config)
            for number in range(2):
                step(trainer, number)
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / "state"
                path.mkdir()
                trainer.save(path)
                for file in path.rglob("*"):
                    pickled = file.is_file() and file.read_bytes()[:4].startswith(PICKLES)
                    expect(not pickled, f"{label} save() writes a pickle ({file.name}): use safetensors and JSON")
                fresh = self.make(config, seed=3)
                step(fresh, 7)  # a state different from the saved one, which load() must overwrite completely
                fresh.load(path)
            same_weights(weights_of(trainer), weights_of(fresh), f"{label} after save() and load():")
            for number in (2, 3):
                a, b = step(trainer, number), step(fresh, number)
                expect(a == b, f"{label} step {number} reports {a}, but {b} after save() and load()")
                same_weights(weights_of(trainer), weights_of(fresh), f"{label} step {number} after save() and load():")

    def test_skipped_step(self) -> None:
        """A gradient that is not finite skips the step. The trainer reports why, and weights and optimizer do not
        change."""
        for config in self.grid():
            for loss in (InfiniteLoss(), InfiniteGradient()):
                label = f"{self.label(config)} with {loss.name}:"
                trainer, twin = self.make(config), self.make(config)
                for t in (trainer, twin):
                    step(t, 0)
                weights = weights_of(trainer)
                result = step(trainer, 1, loss)
                expect(bool(result.skipped), f"{label} apply() must skip the step and say why, got {result}")
                same_weights(weights, weights_of(trainer), f"{label} a skipped step")
                clean = [bool(torch.isfinite(g).all()) for g in trainer.gradients().values()]
                expect(all(clean), f"{label} gradients that are not finite survive the skipped step")
                after = step(trainer, 2)
                expect(not after.skipped, f"{label} the step after a skipped one is skipped too: {after}")
                twin.skip_updates(1)
                step(twin, 2)
                same_weights(weights_of(trainer), weights_of(twin), f"{label} the step after a skipped one:")
                finite = all(bool(torch.isfinite(v).all()) for v in weights_of(trainer).values())
                expect(finite, f"{label} weights are not finite after the step that follows a skipped one")

    def test_skip_updates(self) -> None:
        """After ``skip_updates(n)`` the learning rate equals the one after n steps."""
        for config in self.grid():
            label, trainer, twin = self.label(config), self.make(config), self.make(config)
            step(trainer, 0), step(twin, 0)
            trainer.skip_updates(2)
            for _ in range(2):
                step(twin, 1, InfiniteLoss())  # skipped, and counted
            a, b = step(trainer, 2), step(twin, 2)
            expect(a.lr == b.lr, f"{label} after skip_updates(2) lr is {a.lr}; after two skipped steps it is {b.lr}")
            same_weights(weights_of(trainer), weights_of(twin), f"{label} after skip_updates(2) and a step:")

    def test_change(self) -> None:
        """A ``change`` of the learning rate applies from the next step on, to the weights and to the rate that
        ``apply`` reports. A ``change`` to equal options has no effect."""
        for config in self.grid():
            label, trainer, twin, other = self.label(config), *(self.make(config) for _ in range(3))
            if "lr" not in type(trainer).changeable:
                continue
            lowered = trainer.config.model_copy(update={"lr": trainer.config.lr / 2})
            for subject, new in ((trainer, lowered), (twin, twin.config), (other, None)):
                step(subject, 0)
                if new is not None:
                    subject.change(new)
            a, b, c = step(trainer, 1), step(twin, 1), step(other, 1)
            expect(b == c, f"{label} after change() to the same options a step reports {b}, but {c} without it")
            same_weights(weights_of(twin), weights_of(other), f"{label} after change() to the same options:")
            expect(a.lr == c.lr / 2, f"{label} after change() to half of lr, apply() reports {a.lr}, not {c.lr / 2}")
            moved = any(not same_bits(v, weights_of(other)[n]) for n, v in weights_of(trainer).items())
            expect(moved or not c.lr, f"{label} after change() to half of lr a step moves the weights as far as before")

    def test_offload(self) -> None:
        """Between ``offload`` and ``reload`` (``Offloads``) a trainer can compute ``forward`` and ``weights``. The next
        step equals a step without them."""
        if not issubclass(self.cls, Offloads):
            return
        for config in self.grid():
            label, trainer, twin = self.label(config), self.make(config), self.make(config)
            step(trainer, 0), step(twin, 0)
            trainer.offload()
            outputs = [t.forward([batch_of(1)], ("logprobs",))[0]["logprobs"] for t in (trainer, twin)]
            expect(same_bits(*outputs), f"{label} after offload() log-probs differ")
            same_weights(weights_of(trainer), weights_of(twin), f"{label} after offload():")
            trainer.reload()
            a, b = step(trainer, 1), step(twin, 1)
            expect(a == b, f"{label} after offload() and reload() a step reports {a}, but {b} without them")
            same_weights(weights_of(trainer), weights_of(twin), f"{label} after offload(), reload() and a step:")

    def test_zero_grad(self) -> None:
        """``zero_grad`` discards gradients: the step after it equals a step that never had them."""
        for config in self.grid():
            label, trainer, twin = self.label(config), self.make(config), self.make(config)
            accumulate(trainer, 5)
            trainer.zero_grad()
            a, b = step(trainer, 0), step(twin, 0)
            expect(a == b, f"{label} after zero_grad() a step reports {a}, but {b} without the discarded gradients")
            same_weights(weights_of(trainer), weights_of(twin), f"{label} after zero_grad():")

    def test_weights(self) -> None:
        """``weights`` (``SendsWeights``) names Hugging Face parameters, each once, in a fixed order, and
        ``load_weights`` (``TakesWeights``) loads them."""
        if not issubclass(self.cls, SendsWeights):
            return
        for config in self.grid():
            label, trainer = self.label(config), self.make(config)
            names = [n for n, _ in trainer.weights()]
            expect(len(set(names)) == len(names) > 0, f"{label} weights() names a tensor twice or none: {names}")
            expect(names == [n for n, _ in trainer.weights()], f"{label} weights() changes its order")
            module_names = set(self.plain().module.state_dict())
            expect(
                set(names) <= module_names,
                f"{label} weights() names {sorted(set(names) - module_names)}, unknown to transformers",
            )
            if not issubclass(self.cls, TakesWeights):
                continue
            step(trainer, 0)
            other = self.make(config, trained=False)
            other.load_weights(iter(weights_of(trainer).items()))
            same_weights(weights_of(trainer), weights_of(other), f"{label} after load_weights():")
            outputs = [t.forward([batch_of(1)], ("logprobs",))[0]["logprobs"] for t in (trainer, other)]
            expect(same_bits(*outputs), f"{label} equal weights give different log-probs: not all of them were loaded")

    def test_export(self) -> None:
        """``export`` writes safetensors with a tokenizer; transformers loads it and computes the same log-probs."""
        for config in self.grid():
            label, trainer = self.label(config), self.make(config)
            step(trainer, 0)
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / "model"
                trainer.export(path)
                expect(bool(list(path.glob("*.safetensors"))), f"{label} export() writes no *.safetensors")
                expect(not list(path.glob("*.bin")), f"{label} export() writes pickles (*.bin)")
                try:
                    from transformers import AutoTokenizer

                    AutoTokenizer.from_pretrained(str(path))
                    plain = self.plain(path=path)
                except Exception as error:
                    expect(
                        False, f"{label} transformers cannot load what export() wrote: {type(error).__name__}: {error}"
                    )
                want = plain.forward([batch_of(1)], ("logprobs",))[0]["logprobs"]
            logprobs = trainer.forward([batch_of(1)], ("logprobs",))[0]["logprobs"]
            delta = float((logprobs - want).abs().max())
            expect(delta <= 1e-5, f"{label} the exported model's log-probs differ by {delta:.1e}")

    def test_views(self) -> None:
        """A view that the trainer does not have is refused. The live weights are not used instead."""
        for config in self.grid():
            try:
                self.make(config, trained=False).forward([batch_of(1)], ("logprobs",), "no_such_view")
            except Exception as error:
                expect(
                    "no_such_view" in str(error), f"{self.label(config)} the message does not name the view: {error}"
                )
            else:
                expect(False, f"{self.label(config)} forward() accepts the view 'no_such_view', which does not exist")

    def test_use_view(self) -> None:
        """Between ``use_view(view)`` and ``use_view("live")`` (``HasViews``) the trainer computes with that view.
        Afterwards its state is unchanged. The tensors of a view keep its values after the last one was read."""
        if not issubclass(self.cls, HasViews):
            return
        for config in self.grid():
            trainer, twin = self.make(config), self.make(config)
            step(trainer, 0), step(twin, 0)
            batch = [batch_of(1)]
            for view in (v for v in trainer.facts().views if v != "live"):
                label = f"{self.label(config)} use_view({view!r}):"
                weights = weights_of(trainer, view)
                if isinstance(trainer, SendsWeights):
                    tensors = dict(trainer.weights(view))  # as a bucket holds them
                    same_weights(weights, tensors, f"{label} tensors of weights({view!r}), after the last was read:")
                values = trainer.forward(batch, ("logprobs",), view)[0]["logprobs"]
                trainer.use_view(view)
                expect(trainer.current_view == view, f"{label} current_view is {trainer.current_view!r}")
                same_weights(weights, weights_of(trainer), f"{label} weights() of this view:")
                for view_name in ("live", view):
                    logprobs = trainer.forward(batch, ("logprobs",), view_name)[0]["logprobs"]
                    expect(
                        same_bits(logprobs, values),
                        f"{label} log-probs of the view {view_name!r} are not those of {view!r}",
                    )
                trainer.use_view("live")
                same_weights(weights_of(trainer), weights_of(twin), f"{label} after use_view('live'):")
            a, b = step(trainer, 1), step(twin, 1)
            expect(a == b, f"{self.label(config)} a step after use_view('live') reports {a}, but {b} without it")
            same_weights(weights_of(trainer), weights_of(twin), f"{self.label(config)} a step after use_view('live'):")


def batch_of(seed: int) -> Any:
    return columns(fabricate.batch(seed))


def accumulate(trainer: Any, number: int, loss: Any = None) -> None:
    """Gradients of one fabricated optimizer batch in two micro-batches."""
    loss = loss or TokenLoss()
    batch = slim_batch(optimizer_batch(loss, seed=number), loss)
    half = batch.units // 2
    trainer.accumulate([batch.select(range(half)), batch.select(range(half, batch.units))], loss, {}, {})


def step(trainer: Any, number: int, loss: Any = None) -> Any:
    """One optimizer step on the fabricated batch of that number."""
    accumulate(trainer, number, loss)
    return trainer.apply()


def weights_of(trainer: Any, view: str = "live") -> dict[str, Tensor]:
    """A copy of the weights: those that the trainer sends, or those of its export."""
    if isinstance(trainer, SendsWeights):
        return {name: values.detach().cpu().clone() for name, values in trainer.weights(view)}
    with tempfile.TemporaryDirectory() as folder:
        trainer.export(Path(folder) / "model", view)
        files = (Path(folder) / "model").glob("*.safetensors")
        return {name: values.clone() for file in files for name, values in load_file(str(file)).items()}


def same_weights(a: dict[str, Tensor], b: dict[str, Tensor], label: str) -> None:
    """Fails unless both have equal names and bit-equal tensors."""
    expect(a.keys() == b.keys(), f"{label} the names of the tensors differ: {sorted(a.keys() ^ b.keys())}")
    differing = [name for name in a if not same_bits(a[name], b[name])]
    expect(not differing, f"{label} {len(differing)} of {len(a)} tensors are not bit-equal, such as {differing[:3]}")
