"""An update's optimizer steps: what each is weighed by, and how their metrics become the step's."""

from types import SimpleNamespace

import pytest
import torch
from rlhf.errors import TrainingError
from rlhf.interfaces import ApplyResult
from rlhf.ops.packing import SequenceData, UnitData, pack
from rlhf.types import Annotation, Update
from rlhf_runtime.loop.learn import LearnReports, learn, minibatches, train

from tests.support.losses import NllLoss


class Told:
    """Stands where a role is: its optimizer steps give what they are told, and it keeps what it is asked."""

    def __init__(self, *results):
        self.results, self.asked, self.trained = list(results), [], []

    def annotate(self, batch, annotations):
        """Column := the number of optimizer steps taken so far."""
        self.asked.append((batch.units, [a.column for a in annotations]))
        for a in annotations:
            batch = batch.with_column("tok", a.column, torch.full((batch.tokens,), float(len(self.trained))))
        return batch

    def update(self, batch, loss, update):
        self.trained.append(batch)
        return self.results.pop(0)


class Skips(LearnReports):
    def __init__(self):
        self.events = []

    def skipped(self, step, reason, minibatch):
        self.events.append((step, reason, minibatch))


class Plain(NllLoss):
    name = "plain"

    def __init__(self, prepass=()):
        self._prepass = prepass

    def prepass(self):
        return self._prepass


def batch(units=4):
    return pack([UnitData([SequenceData([n, n + 1, n + 2], {"loss_mask": [True] * 3})]) for n in range(units)])


def step(loss, ratio, count, norm, lr, skipped=""):
    return {"loss": (loss, 0.0), "ratio": (ratio, count)}, ApplyResult(norm, lr, skipped)


def test_losses_are_averaged_over_optimizer_steps_and_counted_values_over_what_was_counted():
    role, skips = Told(step(1.0, 6.0, 2.0, 3.0, 0.3), step(4.0, 2.0, 6.0, 5.0, 0.2)), Skips()
    metrics = train(batch(), Plain(), {"policy": role}, Update("policy", "plain", minibatches=2), 0, 0, skips)
    assert metrics == {
        "policy/loss": 2.5,  # (1 + 4) / 2 optimizer steps
        "policy/ratio": 1.0,  # (6 + 2) / (2 + 6) tokens
        "policy/lr": 0.2,  # of the last step
        "policy/grad_norm": 4.0,
        "policy/skipped": 0.0,
    }
    assert skips.events == []


def test_a_skipped_optimizer_step_is_counted_and_kept_and_its_numbers_are_left_out():
    nan = float("nan")
    role = Told(step(1.0, 6.0, 2.0, 3.0, 0.3), step(nan, nan, 2.0, nan, 0.3, "a gradient is nan"))
    skips = Skips()
    update = Update("policy", "plain", minibatches=2)
    metrics = train(batch(), Plain(), {"policy": role}, update, 0, 2, skips)
    assert metrics == {
        "policy/loss": 1.0,
        "policy/ratio": 3.0,
        "policy/lr": 0.3,
        "policy/grad_norm": 3.0,
        "policy/skipped": 1.0,
    }
    [(number, reason, minibatch)] = skips.events
    assert (number, reason) == (2, "policy: a gradient is nan")
    assert torch.equal(minibatch.ids_N, role.trained[1].ids_N)


def test_a_step_of_skipped_optimizer_steps_only_has_no_gradient_norm():
    """By its absence a run tells that no weight moved (``updates`` of a run)."""
    role = Told(step(1.0, 6.0, 2.0, 3.0, 0.3, "a gradient is nan"))
    metrics = train(batch(), Plain(), {"policy": role}, Update("policy", "plain"), 0, 0, LearnReports())
    assert metrics == {"policy/lr": 0.3, "policy/skipped": 1.0}


def test_each_minibatch_is_weighed_alone_after_a_prepass_with_the_current_weights():
    role = Told(*[step(0.0, 0.0, 1.0, 1.0, 0.1)] * 4)
    loss = Plain((Annotation("policy", "logprobs", "now"),))
    train(batch(), loss, {"policy": role}, Update("policy", "plain", epochs=2, minibatches=2), 0, 0, LearnReports())
    assert role.asked == [(2, ["now"])] * 4
    for number, minibatch in enumerate(
        role.trained
    ):  # two units of two trained tokens, behind one that nothing predicts
        assert minibatch.tok["now"].tolist() == [0, number, number] * 2
        assert minibatch.tok["weight/nll"].tolist() == [0, 0.25, 0.25] * 2
    for epoch in (role.trained[:2], role.trained[2:]):
        assert sorted(int(m.ids_N[i]) for m in epoch for i in (0, 3)) == [0, 1, 2, 3], "every unit once"


def test_every_epoch_step_and_seed_has_an_order_of_its_own():
    def orders(seed: int, step: int) -> list[list[int]]:
        batches = list(minibatches(batch(12), Update("policy", "plain", epochs=2, minibatches=2), seed, step))
        assert [minibatch.units for minibatch in batches] == [6] * 4
        units = [int(minibatch.ids_N[3 * n]) for minibatch in batches for n in range(6)]
        return [units[:12], units[12:]]

    permutations = [*orders(0, 0), *orders(0, 1), *orders(1, 0)]
    assert all(sorted(order) == list(range(12)) for order in permutations)
    assert len({tuple(order) for order in permutations}) == 6
    assert orders(0, 0) == permutations[:2]


def test_errors_before_an_optimizer_step_name_the_loss_or_the_algorithm():
    class Refusing(Plain):
        def prepare(self, batch):
            raise ValueError("no pairs")

    role = Told()
    with pytest.raises(TrainingError, match=r"loss 'plain'.*no pairs"):
        train(batch(), Refusing(), {"policy": role}, Update("policy", "plain"), 0, 0, LearnReports())
    assert role.trained == []

    def credit(batch):
        raise ValueError("no rewards")

    broken = SimpleNamespace(name="broken", annotations=lambda step: [], credit=credit)
    with pytest.raises(TrainingError, match=r"algorithm 'broken'.*no rewards"):
        learn(batch(), broken, {}, 0, 0, LearnReports())


def test_a_column_is_left_out_by_a_single_optimizer_step_only():
    live = {"old_logprobs": "logprobs"}
    for changes in ({"epochs": 2}, {"minibatches": 2}):
        with pytest.raises(TrainingError, match=r"optimizer steps and leaves out \['old_logprobs'\]"):
            train(
                batch(),
                Plain(),
                {"policy": Told()},
                Update("policy", "plain", live=live, **changes),
                0,
                0,
                LearnReports(),
            )
    role = Told(step(0.0, 0.0, 1.0, 1.0, 0.1))
    train(batch(), Plain(), {"policy": role}, Update("policy", "plain", live=live), 0, 0, LearnReports())
    assert len(role.trained) == 1


def test_every_role_annotates_once_what_is_asked_of_it_and_every_update_reports():
    policy, critic = Told(step(1.0, 0.0, 1.0, 1.0, 0.1)), Told(step(2.0, 0.0, 1.0, 1.0, 0.2))
    annotations = [Annotation(r, "logprobs", c) for r, c in (("policy", "a"), ("critic", "b"), ("policy", "c"))]
    calls = []
    algorithm = SimpleNamespace(
        name="plain",
        annotations=lambda step: annotations,
        credit=lambda batch: (batch.with_column("unit", "credit", torch.ones(batch.units)), {"reward/mean": 0.5}),
        updates=lambda step, batch: calls.append((step, batch)) or [Update("policy", "one"), Update("critic", "two")],
        parts={"one": Plain(), "two": Plain()},
    )
    metrics = learn(batch(), algorithm, {"policy": policy, "critic": critic}, 0, 3, LearnReports())
    assert policy.asked == [(4, ["a", "c"])]
    assert critic.asked == [(4, ["b"])]
    assert all({"a", "b", "c"} <= set(role.trained[0].tok) for role in (policy, critic))
    assert all("credit" in role.trained[0].unit for role in (policy, critic))
    [(number, credited)] = calls
    assert (number, set(credited.unit)) == (3, {"credit"}), "asked once, for the batch that credit returned"
    assert (metrics["reward/mean"], metrics["policy/loss"], metrics["critic/loss"]) == (0.5, 1.0, 2.0)
    assert (metrics["policy/lr"], metrics["critic/lr"]) == (0.1, 0.2)
