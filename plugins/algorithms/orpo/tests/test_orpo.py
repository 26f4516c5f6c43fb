"""ORPO: log-odds at every scale, the loss by hand, and which tokens the likelihood is of."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from rlhf.types import Image
from rlhf.types.examples import Example
from rlhf_plugin_orpo import CLOSEST, ORPO, TEXT_MASK, ORPOLoss, log1mexp, log_odds

from tests.support import pairs

SCALES = [-1e-6, -1e-4, -1e-2, -0.5, -0.6931, -0.6932, -1.0, -5.0, -20.0, -87.0, -1e4]


def exact_log1mexp(x: float) -> float:
    return math.log(-math.expm1(x)) if x > -1 else math.log1p(-math.exp(x))


@pytest.mark.parametrize("x", SCALES)
def test_log1mexp_and_its_gradient_at_every_scale(x: float):
    leaf = torch.tensor([x], requires_grad=True)
    value = log1mexp(leaf)
    value.backward()
    x_fp32 = leaf.item()  # as fp32 holds it
    assert value.item() == pytest.approx(exact_log1mexp(x_fp32), rel=2e-6, abs=1e-37)
    slope = math.exp(x_fp32) / math.expm1(x_fp32)
    assert leaf.grad.item() == pytest.approx(slope, rel=2e-6, abs=1e-37)


def test_log_odds_by_hand():
    p = torch.tensor([0.5, 0.9, 0.1])
    assert log_odds(p.log()).tolist() == pytest.approx([0.0, math.log(9), -math.log(9)], abs=1e-6)


@pytest.mark.parametrize("logprob", [0.0, -1e-9, -1e-7])
def test_odds_of_a_certain_answer_are_bounded_with_a_gradient(logprob: float):
    leaf = torch.tensor([logprob], requires_grad=True)
    value = log_odds(leaf)
    value.backward()
    assert value.item() == pytest.approx(math.log(1e6), rel=1e-5)
    assert leaf.grad.item() == pytest.approx(1e6, rel=1e-2)
    assert log_odds(torch.tensor([CLOSEST])).item() == pytest.approx(value.item())


def pair(prompt=2, chosen=2, rejected=1, index=0):
    return pairs.pair(chosen, rejected, index, prompt)


def loss_of(logprobs, examples, **config):
    return pairs.loss_of(ORPO, ORPOLoss(ORPOLoss.Config(**config)), logprobs, examples)


HALF, QUARTER = math.log(0.5), math.log(0.25)


def test_the_loss_by_hand():
    """P(chosen) = 1/2, the geometric mean of 1 and 1/4; P(rejected) = 1/4. Odds 1 and 1/3, their ratio 3."""
    loss, gradient, metrics = loss_of([0.0, QUARTER, QUARTER], [pair()], beta=0.5)
    nll, odds = -QUARTER / 2, -math.log(3 / 4)
    assert loss == pytest.approx(nll + 0.5 * odds, rel=1e-6)
    slope = 0.5 * -(1 / 4)  # beta x -(1 - sigma(log 3)); d log odds / d log p = 1 / (1 - p)
    assert gradient == pytest.approx([-0.5 + slope * 2 / 2] * 2 + [-slope * 4 / 3], rel=1e-5)
    expected = {"loss": loss, "loss/nll": nll, "loss/odds": 0.5 * odds, "accuracy": 1.0, "reward_margin": 0.5 * -HALF,
                "chosen_reward": 0.5 * HALF, "rejected_reward": 0.5 * QUARTER, "chosen_logprobs": HALF,
                "rejected_logprobs": QUARTER, "log_odds": math.log(3)}  # fmt: skip
    assert metrics == pytest.approx(expected, rel=1e-5)


def test_the_likelihood_may_be_of_the_prompt_too_but_the_odds_are_the_answers():
    """A prompt of three tokens, of which the first is predicted by nothing: its other two have probability 1/2."""
    examples = [pair(prompt=3)]
    loss = ORPOLoss(ORPOLoss.Config(nll_on="all"))
    batch = ORPO(parts={"loss": loss}).assemble(examples)[0]
    assert batch.tok[TEXT_MASK].tolist() == [False, True, True, True, True, False, False, False, True]
    assert batch.tok["loss_mask"].tolist() == [False, False, False, True, True, False, False, False, True]
    total, _, metrics = loss_of([HALF, HALF, 0.0, QUARTER, QUARTER], examples, nll_on="all")
    assert metrics["loss/nll"] == pytest.approx((4 * math.log(2)) / 4)
    assert metrics["log_odds"] == pytest.approx(math.log(3), rel=1e-5)
    assert total == pytest.approx(math.log(2) - 0.1 * math.log(3 / 4), rel=1e-6)


def test_the_tokens_of_an_image_in_the_prompt_are_not_trained_on():
    example = pair(prompt=4)
    images = (Image(b"", 1, 2, ()),)
    example = Example(example.row, [replace(sequence, images=images) for sequence in example.sequences])
    batch = ORPO(parts={"loss": ORPOLoss(ORPOLoss.Config(nll_on="all"))}).assemble([example])[0]
    assert batch.tok[TEXT_MASK].tolist() == [False, False, False, True, True, True, *[False] * 4, True]


def test_the_likelihood_is_the_mean_over_tokens_of_the_batch():
    """Chosen answers of one and three tokens."""
    examples = [pair(chosen=1), pair(chosen=3, index=1)]
    metrics = loss_of([-4.0, -1.0, -1.0, -1.0, -1.0, -1.0], examples)[2]
    assert metrics["loss/nll"] == pytest.approx((4.0 + 3.0) / 4)


@pytest.mark.parametrize("chosen", [0.0, -1e-8, -1.0, -1e4])
@pytest.mark.parametrize("rejected", [0.0, -1e-8, -1.0, -1e4])
def test_log_probs_at_the_extremes(chosen: float, rejected: float):
    loss, gradient, metrics = loss_of([chosen, chosen, rejected], [pair()])
    assert all(math.isfinite(v) for v in (loss, *gradient, *metrics.values()))
    assert gradient[2] >= 0 >= gradient[0]
    if rejected >= chosen:  # far apart the other way round nothing is left to learn
        assert gradient[2] > 0
