"""Held-out rows: answered in bounded batches under numbers of their own, or measured by the losses of training."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from rlhf.errors import RolloutError
from rlhf.ops.packing import SequenceData, UnitData, pack
from rlhf.types import Annotation, Group, Needs, Row, Sampling, Snapshot, Trajectory, Turn, Update
from rlhf.types.examples import Example, Sequence
from rlhf_runtime.config.sections import EvalSection
from rlhf_runtime.loop.evaluate import evaluate_loss, evaluate_rollouts
from rlhf_runtime.samples.failures import Failures
from rlhf_runtime.samples.rollout_settings import RolloutSettings

from tests.support.losses import NllLoss

ROWS = [Row({}, "held_out", i) for i in range(5)]


class Answered:
    """Stands where the rollouts are: the rewards of a row's two samples are its number and 1; every call is kept."""

    def __init__(self):
        self.calls = []

    def run(self, rows, first_number, settings, count):
        self.calls.append(([r.index for r in rows], first_number, settings))
        groups = []
        for number, row in enumerate(rows, first_number):
            turns = [Turn([1], False), Turn([2, 3], True, [-1.0, -1.0])]
            samples = [Trajectory(row, turns, (number, s), reward=float(r)) for s, r in enumerate((row.index, 1))]
            groups.append(Group(row, number, samples))
            count(2 * len(groups), 2 * len(rows))
        return groups


def test_rows_are_answered_in_batches_under_their_own_numbers():
    rollouts, progress = Answered(), []
    settings = RolloutSettings(Sampling(), 2, "eval", 0, 10, 1.0)
    assert settings.abort_on_failure, "what training does"
    section = EvalSection(samples=2, pass_threshold=2.0)
    metrics, groups = evaluate_rollouts(rollouts, ROWS, settings, section, 2, lambda *counts: progress.append(counts))
    expected = replace(settings, abort_on_failure=False)
    assert rollouts.calls == [([0, 1], 0, expected), ([2, 3], 2, expected), ([4], 4, expected)]
    assert progress == [(2, 10), (4, 10), (6, 10), (8, 10), (10, 10)], "after each row, whose two samples end at once"
    assert [g.number for g in groups] == [0, 1, 2, 3, 4]
    assert metrics["eval/reward"] == (0 + 1 + 2 + 3 + 4 + 5 * 1) / 10
    assert metrics["eval/avg@2"] == 3 / 10, "rewards of at least 2"
    assert all(name.startswith("eval/") for name in metrics)


class Failing(Answered):
    """Every sample fails and is counted."""

    def run(self, rows, first_number, settings, count):
        groups = super().run(rows, first_number, settings, count)
        samples = [sample for group in groups for sample in group.trajectories]
        settings.failures.expect(len(samples))
        for sample in samples:
            sample.status = "failed"
            settings.failures.add(sample)
        return groups


def test_the_share_of_failed_samples_is_that_of_this_evaluation():
    failures = Failures(0.5, lambda note: None)
    failures.expect(20)
    for row in range(20):
        failures.add(Trajectory(Row({}, "held_out", row), [], (row, 0), reward=0.0))
    settings = RolloutSettings(Sampling(), 2, "eval", 0, 10, 1.0, failures=failures)
    with pytest.raises(RolloutError, match="3 of the latest 4 samples failed"):
        evaluate_rollouts(Failing(), ROWS, settings, EvalSection(samples=2), 2)


class Measured:
    """Stands where a role is: its sums are what it is told, and it keeps what it is asked."""

    def __init__(self, sums):
        self.sums, self.asked = sums, []

    def annotate(self, batch, annotations):
        for a in annotations:
            batch = batch.with_column("tok", a.column, torch.ones(batch.tokens))
        return batch

    def evaluate(self, batch, loss, update):
        self.asked.append((sorted(batch.tok), sorted(batch.unit), dict(update.coef)))
        return self.sums


class Plain(NllLoss):
    def prepass(self):
        return (Annotation("critic", "logprobs", "now"),)

    def prepare(self, batch):
        return batch.with_column("unit", "prepared", torch.ones(batch.units))


def algorithm(batch):
    return SimpleNamespace(
        name="plain",
        assemble=lambda examples: (batch, {"rows/left_out": 1.0}),
        annotations=lambda step: [Annotation("policy", "logprobs", "old")],
        credit=lambda batch: (batch.with_column("unit", "credit", torch.ones(batch.units)), {"reward/mean": 1.0}),
        updates=lambda step, batch: [
            Snapshot("reference", "policy"),
            Update("policy", "one", coef={"kl": 0.5}),
            Update("critic", "two"),
        ],
        parts={"one": Plain(), "two": Plain()},
    )


def test_losses_are_those_of_training_under_names_of_their_roles():
    batch = pack([UnitData([SequenceData([1, 2], {"loss_mask": [True, True]})])])
    policy, critic = Measured({"loss": (2.0, 0.0), "ratio": (6.0, 4.0)}), Measured({"loss": (3.0, 0.0)})
    metrics = evaluate_loss(algorithm(batch), {"policy": policy, "critic": critic}, [])
    assert metrics == {"eval/loss": 2.0, "eval/ratio": 1.5, "eval/critic/loss": 3.0}
    columns = ["loss_mask", "now", "old", "weight/nll"]
    assert policy.asked == [(columns, ["credit", "prepared"], {"kl": 0.5})]
    assert critic.asked == [(columns, ["credit", "prepared"], {})]


def test_a_source_with_fewer_rows_than_the_algorithm_needs_has_no_losses():
    batch = pack([UnitData([SequenceData([1, 2], {"loss_mask": [True, True]})])])
    method, calls = algorithm(batch), []
    method.needs = lambda: Needs((), rows_min=2)
    method.assemble = lambda examples: (calls.append([e.row.source for e in examples]), (batch, {}))[1]
    roles = {"policy": Measured({"loss": (2.0, 0.0)}), "critic": Measured({"loss": (3.0, 0.0)})}
    examples = [Example(Row({}, source, i), [Sequence([1], [True])]) for i, source in enumerate("bbaca")]
    metrics = evaluate_loss(method, roles, examples)
    assert calls == [["b", "b", "a", "c", "a"], ["a", "a"], ["b", "b"]]
    assert {*metrics} == {f"eval/{source}{role}loss" for source in ("", "a/", "b/") for role in ("", "critic/")}
    assert {*evaluate_loss(method, roles, examples[:2])} == {"eval/loss", "eval/critic/loss"}


def test_examples_that_give_no_batch_give_no_metrics():
    assert evaluate_loss(algorithm(None), {}, []) == pytest.approx({})
