"""The suite of trainers of several ranks: their numbers are those of one rank.

::

    # my_ranks.py, the program of the ranks
    from tests.support.trainer_rank_cases import TrainerRankCases

    class MyRanks(TrainerRankCases):
        module = "my_plugin.trainer"
        make = staticmethod(lambda spec, **options: MyTrainer(MyTrainer.Config(lr=1e-3, **options), spec))

    if __name__ == "__main__":
        MyRanks.main()

    # test_ranks.py, beside it
    class TestTwoRanks(TrainerRanksContract):
        cases = MyRanks
        one_rank = staticmethod(lambda spec, **options: TorchTrainer(TorchTrainer.Config(lr=1e-3, **options), spec))

    class TestFourRanks(FourRanksContract):
        cases = MyRanks
        one_rank = TestTwoRanks.one_rank

Use it after :class:`rlhf_testing.trainer.TrainerContract`, which compares one rank with the plain trainer.
``layouts`` names the ways in which the trainer divides a model (stages of ZeRO), ``only`` chooses the layouts of a
case: ``{"export": ()}`` leaves it out. ``full`` puts cases under the mark ``full``. The suite expects file names,
messages and views of ``rlhf_modeling.sharded``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from rlhf.interfaces import Loss
from rlhf.ops.batch import Batch
from rlhf_testing.contract import expect
from rlhf_testing.suite_losses import LentLoss, TokenLoss, ValueLoss
from safetensors.torch import load_file
from torch import Tensor

from tests.support.image_batches import image_batch, image_shares
from tests.support.losses import NllLoss
from tests.support.rank_batches import STEPS, apart, batch, shares, spec
from tests.support.rank_processes import Ranks
from tests.support.rank_tests import RankTests, reads
from tests.support.token_parts import check_case
from tests.support.trainer_rank_cases import TrainerRankCases
from tests.support.trainer_rank_checks import STEP, check_steps, close, equal, near
from tests.support.trainer_rank_setup import FAMILY
from tests.support.trainer_ranks_state import StateOfRanks

GRADIENT = 1e-5
"""Only the order of sums differs."""
WEIGHTS = 1e-4
"""AdamW amplifies differences in gradients near zero."""
SHARED = ("lora", "optimizer", "weight_decay", "max_grad_norm", "head_fp32", "freeze_vision")
"""Options of variants that the trainer on one rank has too."""


class Reference:
    """A trainer on one rank, on whole batches: its gradients, steps, and weights after them."""

    def __init__(self, trainer: Any, loss: Loss, steps: int) -> None:
        self.trainer = trainer
        trainer.accumulate([batch(0, loss)], loss, {}, {})
        self.gradients: dict[str, Tensor] = trainer.gradients()
        trainer.zero_grad()
        self.steps = [trainer.update([batch(number, loss)], loss, {}, {}) for number in range(steps)]
        self.weights, self.average = _weights(trainer), {}
        if "ema" in trainer.facts().views:
            self.average = _weights(trainer, "ema")


class OneRank(RankTests):
    """The trainer on one rank with which ranks are compared."""

    cases: type[TrainerRankCases]
    one_rank: Any = None
    """``one_rank(spec, **options)``: a trainer on one rank that is known to be right. Set a ``staticmethod``."""


class TrainerRanksContract(StateOfRanks, OneRank):
    """Two ranks, or as many as :attr:`world` says."""

    bf16: tuple[float, float, float] = (0.03, 0.02, 0.02)
    """Allowed differences of bf16 gradients, and of the losses and norms of steps: the order of rounding differs."""

    def micros(self, number: int, loss: Loss | None = None, **options: Any) -> list[list[Batch]]:
        """[rank][micro-batch]: what each rank gets of an optimizer batch (:meth:`RankCases.mine`)."""
        share = self.cases.share
        dealt = shares(batch(number, loss, options.get("units", 7)), self.world // share, options.get("budget", 40))
        return [dealt[rank // share] for rank in range(self.world)]

    def check_steps(self, results: list[Any], reference: Reference, loss: float = STEP, norm: float = STEP) -> None:
        steps = [rank["steps"] for rank in results]
        check_steps(steps, reference.steps, loss, norm, least=loss, share=self.cases.share)

    @pytest.fixture(scope="class")
    @classmethod
    def reference(cls, ranks: Ranks) -> Reference:
        return Reference(cls.one_rank(spec(ranks.folder), ema_decay=0.9, weight_decay=0.1), TokenLoss(), STEPS)

    @reads("equal")
    def test_gradients_and_five_steps(self, ranks: Ranks, reference: Reference, layout: str) -> None:
        results = ranks("equal", layout)
        close(ranks.tensors(f"gradients-{layout}"), reference.gradients, GRADIENT, "the gradients of the first step")
        first = [rank == 0 for rank in range(self.world)]
        equal([bool(rank["names"]) for rank in results], first, "which ranks return whole gradients")
        equal([bool(rank["streamed"]) for rank in results], first, "which ranks stream whole weights")
        micros = [rank["micros"] for rank in results]
        expect(len({*micros}) == 1 < micros[0], f"this test needs several micro-batches on each rank, got {micros}")
        trained = reference.trainer.facts().trained_parameters
        equal([rank["trained"] for rank in results], [trained] * self.world, "the number of trained parameters")
        self.check_steps(results, reference)
        close(ranks.tensors(f"weights-{layout}"), reference.weights, WEIGHTS, "the weights after five steps")
        close(ranks.tensors(f"average-{layout}"), reference.average, WEIGHTS, "the average after five steps")
        expect(apart(reference.average, reference.weights) > 1e-3, "this test needs an average that differs")

    @reads("equal")
    def test_scores_evaluation_and_coverage(self, ranks: Ranks, reference: Reference, layout: str) -> None:
        results, trainer = ranks("equal", layout), reference.trainer
        for rank, dealt in enumerate(self.micros(9)):
            scores = ranks.tensors(f"scores-{layout}-{rank}")
            for n, want in enumerate(trainer.forward(dealt, ("logprobs",))):
                torch.testing.assert_close(scores[str(n)], want["logprobs"], atol=1e-3, rtol=0)  # five steps of AdamW
        sums = trainer.evaluate([batch(9)], TokenLoss(), {}, {})
        losses = [rank["evaluated"] for rank in results[:: self.cases.share]]
        near(sum(losses), sums["loss"][0], 1e-3, "the sum of evaluate()'s losses")
        equal([rank["coverage"] for rank in results], [trainer.coverage()] * self.world, "coverage()")

    @reads("variant")
    def test_options_change_no_number(self, ranks: Ranks, variant: str) -> None:
        options = self.cases.variants[variant]
        other = {key: options[key] for key in SHARED if key in options}
        of_role = {key: options[key] for key in ("dtype", "storage") if key in options}
        reference = Reference(self.one_rank(spec(ranks.folder, **of_role), **other), TokenLoss(), 3)
        gradients, results = ranks.tensors(f"gradients-{variant}"), ranks("variant", variant)
        if of_role.get("dtype") == "bf16":  # bf16 differs from fp32 by 9 % in this measure
            other.pop("head_fp32", None)
            exact = Reference(self.one_rank(spec(ranks.folder), **other), TokenLoss(), 0)
            close(gradients, reference.gradients, self.bf16[0], "the gradients in bf16")
            rounded = apart(gradients, exact.gradients)
            expect(1e-3 < rounded < 0.2, f"gradients in bf16 differ from those in fp32 by {rounded:.1e}")
            self.check_steps(results, reference, *self.bf16[1:])
            return
        close(gradients, reference.gradients, GRADIENT, "the gradients of the first step")
        self.check_steps(results, reference)
        close(ranks.tensors(f"weights-{variant}"), reference.weights, WEIGHTS, "the weights after three steps")

    @reads("images")
    def test_images_that_one_rank_has(self, ranks: Ranks, image: str) -> None:
        results, path = ranks("images", image), ranks.folder / "images"
        options = {key: value for key, value in self.cases.images[image].items() if key in SHARED}
        trainer = self.one_rank(replace(spec(ranks.folder), path=str(path), images=True), **options)
        micros = image_shares(image_batch(path, FAMILY), 1)[0]
        trainer.accumulate(micros, NllLoss(), {}, {})
        close(ranks.tensors(f"gradients-images-{image}"), trainer.gradients(), GRADIENT, "the gradients")
        trainer.zero_grad()
        norms = [trainer.update(micros, NllLoss(), {}, {})[1].grad_norm for _ in range(3)]
        for rank in results:
            near(rank["norms"], norms, 1e-6, "the norms of three steps")
        close(
            ranks.tensors(f"weights-images-{image}"), dict(trainer.weights()), WEIGHTS, "the weights after three steps"
        )
        equal([rank["resumed"] for rank in results], [True, True], "whether load() restores the weights")

    @reads("base")
    def test_the_base_of_adapters_keeps_a_head_that_is_trained_with_them(self, ranks: Ranks, layout: str) -> None:
        for report in (rank_report for rank in ranks("base", layout) for rank_report in rank):
            expect(report.pop("off") < 1e-5, "log-probs of the base change while adapters are trained")
            equal(report.pop("moved"), 2 * 7 + 1, "moved: seven matrices of two layers, and the tied embedding")
            equal(report, dict.fromkeys(report, True), "what training and a checkpoint leave as it was")

    @reads("dropout")
    def test_ranks_have_different_dropout_masks(self, ranks: Ranks, layout: str) -> None:
        """The masks equal those of one rank that computes all micro-batches in the order of their distribution."""
        dealt = shares(batch(0), 2)
        equal(ranks("dropout", layout), [len(dealt[0]), len(dealt[1])], "micro-batches")

        def reference_gradients(micros: Sequence[Any]) -> dict[str, Tensor]:
            trainer = self.one_rank(spec(ranks.folder), lora={"rank": 2, "dropout": 0.5})
            trainer.accumulate(micros, TokenLoss(), {}, {})
            return trainer.gradients()

        gradients = ranks.tensors(f"gradients-dropout-{layout}")
        dealt_out = [micro for pair in zip(*dealt, strict=True) for micro in pair]
        close(gradients, reference_gradients(dealt_out), GRADIENT, "the gradients")
        expect(
            apart(gradients, reference_gradients([*dealt[0], *dealt[1]])) > 0.1,
            "this test needs masks that depend on the order",
        )

    @reads("critic")
    def test_a_critic_and_a_rank_with_filler_units_only(self, ranks: Ranks, layout: str) -> None:
        results, loss = ranks("critic", layout), ValueLoss()
        few = self.micros(4, loss, units=3, budget=12)
        equal(
            [rank["fillers"] for rank in results],
            [["filler" in m.unit for m in micros] for micros in few],
            "filler units",
        )
        expect(results[-1]["fillers"][-1] or self.world == self.cases.share, "this test needs a rank with filler units")
        trainer = self.one_rank(spec(ranks.folder, head="scalar"))
        trainer.accumulate([batch(4, loss, units=3)], loss, {}, {})
        close(ranks.tensors(f"gradients-critic-{layout}"), trainer.gradients(), GRADIENT, "the gradients")
        reference = Reference(self.one_rank(spec(ranks.folder, head="scalar")), loss, 3)
        self.check_steps(results, reference)

    @reads("frozen")
    def test_roles_that_are_not_trained(self, ranks: Ranks, layout: str) -> None:
        for report in ranks("frozen", layout):
            expect(report["moved"] > 1e-2, "this test needs weights that differ from the loaded ones")
            expect(
                report["left"] < 1e-5, f"log-probs after load_weights() differ by {report['left']} from the sender's"
            )
            expect(report["bits"], "load_weights() gives other weights than the sender's")
            expect(report["saved"], "save() and load() change the weights of a frozen role")

    @reads("lent")
    def test_a_lent_head_is_whole_on_every_rank(self, ranks: Ranks, layout: str) -> None:
        """Also if the lent head is divided over the ranks, and tied to the embedding."""
        results = ranks("lent", layout)
        equal([rank["heads"] for rank in results], [1] + [0] * (self.world - 1), "lent heads of each rank")
        lender = self.one_rank(replace(spec(ranks.folder, trained=False), path=str(ranks.folder / "lender")))
        trainer = self.one_rank(spec(ranks.folder))
        trainer.borrow_head("lender", *lender.lend_head())
        full_batch = batch(0, LentLoss())
        [hidden] = lender.forward([full_batch], ("hidden",))
        sums = trainer.accumulate([full_batch.with_column("tok", "lent_hidden", hidden["hidden"])], LentLoss(), {}, {})
        near(sum(rank["loss"] for rank in results[:: self.cases.share]), sums["loss"][0], 1e-5, "the sum of the losses")
        close(ranks.tensors(f"gradients-lent-{layout}"), trainer.gradients(), GRADIENT, "the gradients")

    @reads("experts")
    def test_experts_are_sent_and_loaded_one_by_one(self, ranks: Ranks, layout: str) -> None:
        want = load_file(ranks.folder / "experts" / "model.safetensors")
        for name, factor in (("experts", 1), ("experts-twice", 2)):
            tensors = ranks.tensors(f"{name}-{layout}")
            equal(tensors.keys(), want.keys(), "the names of the weights")
            equal(
                [n for n, t in want.items() if not torch.equal(tensors[n], factor * t)],
                [],
                f"other weights in {name!r}",
            )
        expect(ranks("experts", layout)[0] < len(want), "this test needs experts that are one parameter")

    @reads("alone")
    def test_a_recurrent_model_is_computed_one_length_at_a_time(self, ranks: Ranks, layout: str) -> None:
        """Trainers that gather weights in every call make additional calls, with weight zero, on a rank with fewer
        lengths."""
        (kind, first), (_, second) = ranks("alone", layout)
        equal(kind, "alone", "the layout of the rows")
        expect(first != second, f"this test needs ranks with different lengths, got {first}")
        trainer = self.one_rank(replace(spec(ranks.folder), path=str(ranks.folder / "recurrent")))
        trainer.accumulate([batch(0)], TokenLoss(), {}, {})
        close(ranks.tensors(f"gradients-alone-{layout}"), trainer.gradients(), GRADIENT, "the gradients")

    @reads("rows")
    def test_rows_that_two_ranks_divide_give_the_numbers_of_one(self, ranks: Ranks, row: str) -> None:
        check_case(row, self.one_rank, ranks, ranks("rows", row), 2, 0.03 if row == "bf16" else 1e-5)


class FourRanksContract(OneRank):
    """Four ranks: rows are divided over two of them, and over all."""

    world = 4

    @reads("four")
    def test_rows_that_ranks_divide_give_the_numbers_of_one(self, ranks: Ranks, parts: str, row: str) -> None:
        check_case(row, self.one_rank, ranks, ranks("four", parts, row), int(parts))


def _weights(trainer: Any, view: str = "live") -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in trainer.weights(view)}
