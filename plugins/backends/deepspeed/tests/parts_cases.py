"""Processes of ranks that divide layers, run once for all tests of a file, and the reference: the trainer ``torch``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from parts_names import LORA, MODELS, REFUSED
from rlhf.interfaces import Loss
from rlhf_modeling.adapters import LoraOptions
from rlhf_plugin_local.trainer import TorchTrainer
from rlhf_testing.rank_processes import Ranks as Processes
from rlhf_testing.suite_losses import TokenLoss
from rlhf_testing.tiny import tiny_model
from zero_cases import batch, spec, trainer

HERE = Path(__file__).parent
LOSS = 1e-4


class Ranks(Processes):
    """Ranks that run the cases of ``parts_ranks.py``."""

    def __init__(self, folder: Path, ranks: int) -> None:
        super().__init__(HERE / "parts_ranks.py", folder, ranks, "rlhf_plugin_deepspeed.trainer")


def models(folder: Path) -> Path:
    tiny_model(folder / "model", std=0.2)
    tiny_model(folder / "critic", std=0.2, head="scalar", tied=False)
    tiny_model(folder / "lender", std=0.2, seed=7, hidden=48, heads=4)
    for name, options in {**MODELS, **REFUSED}.items():
        tiny_model(folder / name, std=0.2, **options)
    one = trainer(spec(folder), stage=2, ema_decay=0.9)
    for number in range(2):
        one.update([batch(number)], TokenLoss(), {}, {})
    one.save(folder / "from_one")
    two = trainer(spec(folder), stage=2, lora=LoraOptions(**LORA["all"]))
    for number in range(2):
        two.update([batch(number)], TokenLoss(), {}, {})
    two.save(folder / "adapters")
    return folder


class Reference:
    """The trainer ``torch`` in one process on whole batches."""

    def __init__(
        self, folder: Path, loss: Loss, steps: int, path="", head="lm", dtype="fp32", storage="fp32", **options
    ):
        of = spec(folder, head=head, dtype=dtype, storage=storage)
        of = replace(of, path=str(folder / path)) if path else of
        self.trainer = TorchTrainer(TorchTrainer.Config(**{"lr": 1e-3, "device": "cpu", **options}), of)
        self.trainer.accumulate([batch(0, loss)], loss, {}, {})
        self.gradients = self.trainer.gradients()
        self.trainer.zero_grad()
        self.steps = [self.trainer.update([batch(n, loss)], loss, {}, {}) for n in range(steps)]
        self.weights = {n: t.clone() for n, t in self.trainer.weights()}


def check_steps(found: list[list], wanted: list, loss_within: float = LOSS, norm_within: float = LOSS) -> None:
    """``found``: the steps of each rank; ``wanted``: (sums, result) of each step."""
    for number, (sums, result) in enumerate(wanted[: len(found[0])]):
        at = [rank[number] for rank in found]
        assert all(a[1:] == at[0][1:] for a in at), "norm, rate and reason are the same on every rank"
        losses = [a[0] for a in at]
        assert losses[::2] == losses[1::2], "the ranks of a replica compute the same"
        assert sum(losses[::2]) == pytest.approx(sums["loss"][0], rel=loss_within, abs=loss_within)
        assert at[0][1] == pytest.approx(result.grad_norm, rel=norm_within)
        assert (at[0][2], at[0][3]) == (result.lr, "")
