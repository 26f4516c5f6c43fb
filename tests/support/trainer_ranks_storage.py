"""The tests of weights that are stored in bf16, in the suite of trainers of several ranks. They need one rank, and run
in the process of the tests. The optimizer steps fp32 masters, which are divided in place of the weights.

::

    class TestStored(StoredContract):
        make = staticmethod(lambda spec, **options: MyTrainer(MyTrainer.Config(lr=1e-3, **options), spec))
        one_rank = staticmethod(lambda spec, **options: TorchTrainer(TorchTrainer.Config(lr=1e-3, **options), spec))
        stored = {"default": {}, "muon": {"optimizer": "muon"}}
        only = {"steps": ("default", "muon")}
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from rlhf.errors import ConfigError
from rlhf_testing.contract import expect
from rlhf_testing.suite_losses import TokenLoss, ValueLoss
from rlhf_testing.tiny import tiny_model
from safetensors.torch import load_file
from torch import Tensor

from tests.support.rank_batches import batch, spec
from tests.support.rank_case import held
from tests.support.trainer_rank_checks import close, equal, same_bits
from tests.support.trainer_rank_setup import Options

STORED: dict[str, Any] = {"dtype": "auto", "storage": "bf16"}
MATRIX = "model.layers.0.mlp.up_proj.weight"


def case(name: str) -> Callable[[Any], Any]:
    """Marks a test that runs for the options that ``only`` chooses for this name."""

    def mark(test: Any) -> Any:
        test.case = name
        return test

    return mark


class StoredContract:
    """Weights in bf16 on one rank."""

    make: Any
    """``make(spec, **options)``: the trainer under test. Set a ``staticmethod``."""
    one_rank: Any
    """``one_rank(spec, **options)``: a trainer on one rank that is known to be right. Set a ``staticmethod``."""
    stored: Mapping[str, Options] = {"default": {}}
    """Options of the trainer under test, by name."""
    only: Mapping[str, Sequence[str]] = {}
    """{case: names of the options with which it runs}; the other cases run with the first ones."""
    full: Collection[str] = ()
    """What runs only under the mark ``full``: ``CASE``, or ``CASE-NAME`` for one of its runs."""
    gradients_apart: float = 0.0
    """Allowed difference of the gradients from those of one rank, norm-wise; 0: they are equal bit for bit."""
    steps_apart: float = 1e-4
    """Allowed difference of the steps from those of one rank, norm-wise."""

    def alike(self, options: Options) -> Options:
        """Options with which the trainer on one rank computes the same bits."""
        return {key: options[key] for key in ("lora", "optimizer", "max_grad_norm") if key in options}

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        name = getattr(metafunc.function, "case", None)
        if name is not None:
            runs = self.only.get(name, tuple(self.stored)[:1])
            marks = {run: [pytest.mark.full] if {name, f"{name}-{run}"} & {*self.full} else [] for run in runs}
            metafunc.parametrize("options", [pytest.param(self.stored[run], marks=marks[run], id=run) for run in runs])

    @pytest.fixture(scope="class")
    @classmethod
    def folder(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        folder = tmp_path_factory.mktemp("models")
        tiny_model(folder / "model", std=0.2)
        tiny_model(folder / "critic", std=0.2, head="scalar", tied=False)
        return folder

    def both(self, folder: Path, options: Options, **role: Any) -> tuple[Any, Any]:
        """The trainer under test, and that on one rank."""
        trainer = self.make(spec(folder, **STORED, **role), **options)
        return trainer, self.one_rank(trainer.spec, **self.alike(options))

    @case("steps")
    def test_steps_are_those_of_one_rank(self, folder: Path, options: Options) -> None:
        """Two micro-batches a step. Outputs, and as a rule gradients of the first step, are equal bit for bit; a sum of
        squares in another order changes the clipping in the last digit, which Muon enlarges where it rounds to bf16."""
        trainer, single = self.both(folder, options)
        equal({t.dtype for _, t in trainer.weights()}, {torch.bfloat16}, "number formats of the weights")
        (logprobs,), (want,) = (t.forward([batch(0)], ("logprobs",)) for t in (trainer, single))
        same_bits(logprobs, want.items(), "log-probs")
        start = {name: p.detach().float().reshape(-1).clone() for name, p in single.stepped.items()}
        for instance in (trainer, single):
            instance.accumulate([batch(0), batch(10)], TokenLoss(), {}, {})
        if self.gradients_apart:
            close(trainer.gradients(), single.gradients(), self.gradients_apart, "gradients of the first step")
        else:
            same_bits(trainer.gradients(), single.gradients().items(), "gradients of the first step")
        for instance in (trainer, single):
            instance.apply()
            for number in (1, 2):
                instance.update([batch(number), batch(number + 10)], TokenLoss(), {}, {})
        expected = {name: p.detach().float().reshape(-1) - start[name] for name, p in single.stepped.items()}
        tensors = {name: master - start[name] for name, master in masters(trainer).items()}
        close(tensors, expected, self.steps_apart, "the steps of the masters")
        for (name, tensors), (other, expected) in zip(trainer.weights(), single.weights(), strict=True):
            equal(
                (name, tensors.dtype, tensors.shape), (other, torch.bfloat16, expected.shape), "a weight that is sent"
            )
        if "lora" not in options:
            rounded = {name: master.bfloat16() for name, master in masters(trainer).items()}
            same_bits(
                {n: t.reshape(-1) for n, t in held(trainer).items()}, rounded.items(), "weights, and rounded masters"
            )

    @case("lost")
    def test_steps_that_bf16_would_lose_add_up_in_the_masters(self, folder: Path, options: Options) -> None:
        """A weight of 0.2 has neighbours 1e-3 away in bf16; a step is at most 1e-6."""
        trainer = self.make(spec(folder, **STORED), **{"lr": 1e-6, **options})
        start = held(trainer)[MATRIX]
        distances = []
        for _ in range(3):
            trainer.update([batch(0)], TokenLoss(), {}, {})
            distances.append((masters(trainer)[MATRIX] - start.reshape(-1).float()).abs().mean().item())
        expect(
            distances[2] > 2 * distances[0] > 1e-6, f"masters are {distances} from the start after each of three steps"
        )
        moved = int((held(trainer)[MATRIX] != start).sum())
        expect(moved < 0.05 * start.numel(), f"{moved} of {start.numel()} weights in bf16 changed")
        equal(trainer.coverage()["unchanged"], [], "parameters without a step")

    @case("restart")
    def test_a_restart_continues_bit_for_bit(self, folder: Path, tmp_path: Path, options: Options) -> None:
        def steps(trainer: Any, numbers: Iterable[int]) -> list[Any]:
            return [trainer.update([batch(n), batch(n + 10)], TokenLoss(), {}, {}) for n in numbers]

        options = {"ema_decay": 0.9, **options}
        reference, first, second = (self.make(spec(folder, **STORED), **options) for _ in range(3))
        results = steps(reference, range(4))
        steps(first, range(2))
        first.save(tmp_path)
        second.load(tmp_path)
        first.offload()
        first.reload()
        for other in (first, second):
            equal(steps(other, range(2, 4)), results[2:], "the steps that follow")
            same_bits(masters(other), masters(reference).items(), "masters")
            for view in reference.views:
                same_bits(held(other, view), held(reference, view).items(), f"weights of the view {view!r}")
        formats = {t.dtype for t in load_file(tmp_path / "rank-0-of-1.safetensors").values()}
        equal(formats, {torch.float32}, "number formats of a checkpoint")
        with pytest.raises(ConfigError, match=r"'storage': 'bf16'.*'storage': 'fp32'"):
            self.make(spec(folder), **options).load(tmp_path)

    @case("average")
    def test_the_average_is_of_the_masters(self, folder: Path, options: Options) -> None:
        """fp32, also where weights move by less than bf16's step; rounded where it is sent."""
        trainer = self.make(spec(folder, **STORED), **{"ema_decay": 0.5, "lr": 1e-6, **options})
        start = masters(trainer)[MATRIX]
        trainer.update([batch(0)], TokenLoss(), {}, {})
        after, average = masters(trainer)[MATRIX], by_name(trainer, trainer.average.tensors)[MATRIX]
        same_bits({"average": average}, [("average", start.lerp(after, 0.5))], "the moving average")
        live, logprobs = held(trainer), trainer.forward([batch(0)], ("logprobs",))[0]
        average.add_(1.0)
        average_bf16 = held(trainer, "ema")[MATRIX].reshape(-1)
        same_bits({"sent": average_bf16}, [("sent", average.bfloat16())], "the average that is sent, in bf16")
        other = trainer.forward([batch(0)], ("logprobs",), "ema")[0]["logprobs"]
        expect(not torch.equal(other, logprobs["logprobs"]), "the view 'ema' computes with the live weights")
        same_bits(
            trainer.forward([batch(0)], ("logprobs",))[0], logprobs.items(), "live log-probs after those of the average"
        )
        same_bits(held(trainer), live.items(), "live weights")
        same_bits({"master": masters(trainer)[MATRIX]}, [("master", after)], "live masters")

    @case("loaded")
    def test_weights_of_another_trainer_reach_the_masters(self, folder: Path, options: Options) -> None:
        trainer, other = (self.make(spec(folder, **STORED), **{"lr": lr, **options}) for lr in (1e-3, 1e-2))
        other.update([batch(0)], TokenLoss(), {}, {})
        weights = held(other)
        trainer.load_weights(iter(weights.items()))
        same_bits(masters(trainer), [(name, tensor.float().reshape(-1)) for name, tensor in weights.items()], "masters")
        logprobs, want = (t.forward([batch(1)], ("logprobs",))[0] for t in (trainer, other))
        same_bits(logprobs, want.items(), "log-probs")

    @case("lent")
    def test_a_lent_head_is_in_bf16(self, folder: Path, options: Options) -> None:
        trainer = self.make(spec(folder, **STORED), **options)
        trainer.update([batch(0)], TokenLoss(), {}, {})
        [head], embedding = trainer.lend_head(), held(trainer)["model.embed_tokens.weight"]
        equal(head.weight_VH.dtype, torch.bfloat16, "the number format of the lent head")
        same_bits({"head": head.weight_VH}, [("head", embedding)], "the lent head, tied to the embedding")

    @case("frozen")
    def test_frozen_roles_in_bf16(self, folder: Path, options: Options) -> None:
        trainer, single = self.both(folder, options, trained=False, head="scalar")
        formats = {p.dtype for p in trainer.parameters.values()} | {t.dtype for _, t in trainer.weights()}
        equal(formats, {torch.bfloat16}, "number formats of a frozen role")
        values, want = (t.forward([batch(0)], ("values",))[0] for t in (trainer, single))
        same_bits(values, want.items(), "values")

    @case("adapters")
    def test_adapters_have_a_base_in_bf16(self, folder: Path, options: Options) -> None:
        """Adapters, and the head of a critic that is trained beside them, have masters; the base has none."""
        trainer, single = self.both(folder, {**options, "lora": {"rank": 4}}, head="scalar")
        for instance in (trainer, single):
            for number in range(2):
                instance.update([batch(number, ValueLoss())], ValueLoss(), {}, {})
        base = {p.dtype for name, p in trainer.module.named_parameters() if name not in trainer.parameters}
        equal(base, {torch.bfloat16}, "number formats of the base")
        expected = {name: p.detach().float().reshape(-1) for name, p in single.stepped.items()}
        close(masters(trainer), expected, self.steps_apart / 100, "the masters")
        for (name, tensor), (other, weight) in zip(trainer.weights(), single.weights(), strict=True):
            equal((name, tensor.dtype, weight.dtype), (other, torch.bfloat16, torch.bfloat16), "a weight that is sent")

    @case("export")
    def test_an_export_is_bf16_or_the_masters(self, folder: Path, tmp_path: Path, options: Options) -> None:
        from transformers import AutoModelForCausalLM

        for with_masters, dtype in ((False, torch.bfloat16), (True, torch.float32)):
            trainer = self.make(
                spec(folder, **STORED), **options, export_masters=with_masters, export_shard_bytes=20_000
            )
            trainer.update([batch(0)], TokenLoss(), {}, {})
            path = tmp_path / str(with_masters)
            trainer.export(path)
            saved = {n: t for file in path.glob("*.safetensors") for n, t in load_file(file).items()}
            equal({t.dtype for t in saved.values()}, {dtype}, "number formats of an export")
            flat = {name: tensor.reshape(-1) for name, tensor in saved.items()}
            same_bits(flat, [(name, m.to(dtype)) for name, m in masters(trainer).items()], "exported masters")
            equal(json.loads((path / "config.json").read_text())["dtype"], str(dtype)[6:], "config.json: dtype")
            equal(AutoModelForCausalLM.from_pretrained(path, dtype="auto").dtype, dtype, "transformers' number format")
            index = json.loads((path / "model.safetensors.index.json").read_text())
            equal(index["metadata"]["total_size"], sum(t.nbytes for t in saved.values()), "bytes of an export")


def masters(trainer: Any) -> dict[str, Tensor]:
    """{name: [n] fp32}: what the optimizer steps."""
    return {
        name: data.clone() for name, data in by_name(trainer, [flat.data for flat in trainer.partition.flats]).items()
    }


def by_name(trainer: Any, flats: Sequence[Tensor]) -> dict[str, Tensor]:
    """{name: [n], a view} of tensors that lie as the flats of the partition do."""
    pieces = ((piece, data) for flat, data in zip(trainer.partition.flats, flats, strict=True) for piece in flat.pieces)
    return {piece.name: data[piece.offset : piece.offset + piece.numel] for piece, data in pieces}
