"""SimPO: the loss by hand, at extremes, and which options go together."""

from __future__ import annotations

import math

import pytest
from pydantic import ValidationError
from rlhf_plugin_simpo import SimPO, SimPOLoss

from tests.support import pairs
from tests.support.pairs import pair

CHOSEN, REJECTED = [-0.5, -1.5], [-1.0, -2.0, -3.0]
"""Log-probs of two answers, means -1 and -2."""


def loss_of(logprobs, examples, **config):
    return pairs.loss_of(SimPO, SimPOLoss(SimPOLoss.Config(**config)), logprobs, examples)


def test_the_loss_by_hand():
    loss, gradient, metrics = loss_of(CHOSEN + REJECTED, [pair()], beta=2.0, gamma=0.5)
    assert loss == pytest.approx(math.log(1 + math.exp(-1.5)), rel=1e-6)  # 2 (-1 + 2) - 0.5
    slope = -2 / (1 + math.exp(1.5))
    assert gradient == pytest.approx([slope / 2] * 2 + [-slope / 3] * 3, rel=1e-5)
    expected = {"loss": loss, "loss/simpo": loss, "accuracy": 1.0, "reward_margin": 2.0, "chosen_reward": -2.0,
                "rejected_reward": -4.0, "chosen_logprobs": -1.0, "rejected_logprobs": -2.0}  # fmt: skip
    assert metrics == pytest.approx(expected)


def test_gamma_is_on_the_scale_of_the_reward():
    """The paper's gamma, which TRL divides by beta and multiplies again: doubling beta alone moves the margin only."""
    for beta in (1.0, 4.0):
        loss, _, _ = loss_of(CHOSEN + REJECTED, [pair()], beta=beta, gamma=0.7)
        logits = 1.0 - 0.7 / beta
        assert loss == pytest.approx(-math.log(1 / (1 + math.exp(-beta * logits))), rel=1e-6)


def test_smoothing_hinge_and_likelihood_by_hand():
    smoothed, _, _ = loss_of(CHOSEN + REJECTED, [pair()], label_smoothing=0.25)
    plain, turned = math.log(1 + math.exp(-1.5)), math.log(1 + math.exp(1.5))
    assert smoothed == pytest.approx(0.75 * plain + 0.25 * turned, rel=1e-6)
    assert loss_of(CHOSEN + REJECTED, [pair()], loss_type="hinge")[0] == 0.0
    assert loss_of(CHOSEN + REJECTED, [pair()], loss_type="hinge", gamma=3.0)[0] == pytest.approx(2.0)
    # Chosen answers of 2 and 3 tokens: the likelihood is per token, not per answer
    metrics = loss_of(CHOSEN + REJECTED + REJECTED + CHOSEN, [pair(), pair(3, 2, 1)], nll_coef=0.5)[2]
    assert metrics["loss/nll"] == pytest.approx(0.5 * (2.0 + 6.0) / 5)


@pytest.mark.parametrize(
    ("chosen", "rejected", "loss"), [(-1e4, 0.0, 2e4 + 0.5), (0.0, -1e4, 0.0), (0.0, 0.0, 0.974077)]
)
def test_log_probs_at_the_extremes(chosen: float, rejected: float, loss: float):
    value, gradient, metrics = loss_of([chosen] * 2 + [rejected] * 3, [pair()])
    assert value == pytest.approx(loss)
    assert all(math.isfinite(v) for v in (*gradient, *metrics.values()))


def test_smoothing_a_hinge_is_refused():
    with pytest.raises(ValidationError, match=r"label_smoothing = 0\.1 has no effect with loss_type = 'hinge'"):
        SimPOLoss.Config(loss_type="hinge", label_smoothing=0.1)
