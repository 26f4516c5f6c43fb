"""Pairs: packing into units, and the losses of a margin, by hand and at margins that overflow an exponential."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from rlhf.types import Row
from rlhf.types.examples import Example
from rlhf.types.examples import Sequence as TokenSequence
from rlhf_algorithms.pair_learning import PairLearning
from rlhf_algorithms.pairs import hinge_loss, logistic_loss, pair_metrics


class Pairs(PairLearning):
    name = "pairs"


def pair(*masks: list[bool]) -> Example:
    return Example(Row({}, "rows", 0), [TokenSequence([7] * len(m), m, role) for role, m in enumerate(masks)])


def test_pairs_become_units():
    batch, _ = Pairs().assemble([pair([False, True], [False, True, True]), pair([False, True], [False, False, True])])
    assert (batch.unit_B.tolist(), batch.role_B.tolist()) == ([0, 0, 1, 1], [0, 1, 0, 1])
    assert batch.tok["loss_mask"].tolist() == [False, True, False, True, True, False, True, False, False, True]


def test_a_pair_with_an_empty_answer_is_left_out():
    full, half = pair([False, True], [False, True]), pair([False, True], [False, False])
    first = pair([True], [False, True])  # nothing predicts a first token
    assert Pairs().assemble([half, full, first])[0].units == 1
    assert Pairs().assemble([half, first])[0] is None


def test_an_algorithm_counts_what_is_left_out_and_needs_only_a_policy():
    algorithm, full, half = Pairs(), pair([False, True], [False, True]), pair([False, True], [False])
    batch, metrics = algorithm.assemble([full, half, half])
    assert (batch.units, metrics) == (1, {"pairs/left_out": 2.0})
    assert algorithm.assemble([half]) == (None, {})
    assert algorithm.assemble([full])[1] == {}
    assert [(r.name, r.trained) for r in algorithm.needs().roles] == [("policy", True)]


def test_a_margin_becomes_a_column():
    rows = [replace(pair([False, True], [False, True]), values={"margin": m}) for m in (0.5, 2.0)]
    assert Pairs().assemble(rows)[0].unit["margin"].tolist() == [0.5, 2.0]


def test_losses_by_hand():
    margin = torch.tensor([0.0, 2.0, -1.0])
    plain = [math.log(1 + math.exp(-m)) for m in margin.tolist()]
    assert logistic_loss(margin).tolist() == pytest.approx(plain)
    turned = [math.log(1 + math.exp(m)) for m in margin.tolist()]
    expected = [0.9 * a + 0.1 * b for a, b in zip(plain, turned, strict=True)]
    assert logistic_loss(margin, 0.1).tolist() == pytest.approx(expected)
    assert hinge_loss(margin).tolist() == [1.0, 0.0, 2.0]


def test_label_smoothing_puts_the_minimum_at_the_assumed_share_of_swapped_labels():
    point = torch.tensor([math.log(0.8 / 0.2)], requires_grad=True)
    logistic_loss(point, 0.2).sum().backward()
    assert point.grad.item() == pytest.approx(0.0, abs=1e-7)


@pytest.mark.parametrize(("margin", "loss", "slope"), [(1e4, 0.0, 0.0), (-1e4, 1e4, -1.0)])
def test_losses_are_finite_at_margins_that_overflow_an_exponential(margin, loss, slope):
    point = torch.tensor([margin], requires_grad=True)
    value = logistic_loss(point)
    value.sum().backward()
    assert (value.item(), point.grad.item()) == pytest.approx((loss, slope))
    smoothed = logistic_loss(torch.tensor([margin]), 0.1)
    assert smoothed.item() == pytest.approx(1e3 if margin > 0 else 9e3)


def test_metrics_of_pairs_of_which_one_is_a_tie():
    metrics = pair_metrics(torch.tensor([1.0, 0.0, -1.0]), torch.tensor([0.5, 0.0, 2.0]))
    values = {name: (level, v.tolist()) for name, (level, v) in metrics.items()}
    assert values == {
        "accuracy": ("unit", [1.0, 0.5, 0.0]),
        "reward_margin": ("unit", [0.5, 0.0, -3.0]),
        "chosen_reward": ("unit", [1.0, 0.0, -1.0]),
        "rejected_reward": ("unit", [0.5, 0.0, 2.0]),
    }


def test_the_base_class_and_the_hooks_are_imported_without_torch():
    """Options are read from classes, for ``rlhf explain`` and messages, and torch takes seconds."""
    code = "import sys, rlhf_algorithms.pair_learning; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
