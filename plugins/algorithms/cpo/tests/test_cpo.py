"""CPO: every form by hand, the reward of AlphaPO, extremes, and which options go together."""

from __future__ import annotations

import math
import re

import pytest
import torch
from pydantic import ValidationError
from rlhf_plugin_cpo import CPO, EXP_BOUND, CPOLoss, shaped

from tests.support import pairs
from tests.support.pairs import pair

CHOSEN, REJECTED = [-0.5, -1.5], [-1.0, -2.0, -3.0]
"""Sums -2 and -6, means -1 and -2."""


def loss_of(logprobs, examples, **config):
    return pairs.loss_of(CPO, CPOLoss(CPOLoss.Config(**config)), logprobs, examples)


def softplus(x: float) -> float:
    return math.log(1 + math.exp(x))


def smoothed(margin: float, e: float) -> float:
    return (1 - e) * softplus(-margin) + e * softplus(margin)


@pytest.mark.parametrize(
    ("config", "loss"),
    [
        ({}, softplus(-0.4)),  # beta 0.1 x (-2 + 6)
        ({"beta": 0.5}, softplus(-2.0)),
        ({"label_smoothing": 0.2}, smoothed(0.4, 0.2)),
        ({"loss_type": "hinge"}, 0.6),
        ({"loss_type": "ipo"}, (1.0 - 5.0) ** 2),  # means
        ({"loss_type": "simpo", "beta": 2.0}, softplus(-1.5)),  # means, less gamma 0.5
        ({"loss_type": "simpo", "beta": 2.0, "gamma": 1.0, "label_smoothing": 0.2}, smoothed(1.0, 0.2)),
    ],
)
def test_the_forms_by_hand(config, loss):
    value, _, metrics = loss_of(CHOSEN + REJECTED, [pair()], nll_coef=0.0, **config)
    assert value == pytest.approx(loss, rel=1e-6)
    assert set(metrics) == {"loss", "loss/cpo", "accuracy", "reward_margin", "chosen_reward", "rejected_reward",
                            "chosen_logprobs", "rejected_logprobs"}  # fmt: skip
    beta, mean = config.get("beta", 0.1), config.get("loss_type") in ("ipo", "simpo")
    assert (metrics["chosen_logprobs"], metrics["rejected_logprobs"]) == ((-1.0, -2.0) if mean else (-2.0, -6.0))
    assert metrics["reward_margin"] == pytest.approx(beta * (1.0 if mean else 4.0))


@pytest.mark.parametrize(
    ("reduction", "nll"),
    [("token_mean", 8 / 5), ("seq_mean_token_mean", (1.0 + 2.0) / 2), ("seq_mean_token_sum", (2.0 + 6.0) / 2)],
)
def test_the_likelihood_by_hand(reduction, nll):
    """Chosen answers of two and three tokens."""
    logprobs, examples = CHOSEN + REJECTED + REJECTED + CHOSEN, [pair(), pair(3, 2, 1)]
    _, gradient, metrics = loss_of(logprobs, examples, nll_reduce=reduction, nll_coef=0.5)
    assert metrics["loss/nll"] == pytest.approx(0.5 * nll)
    _, plain_gradient, _ = loss_of(logprobs, examples, nll_coef=0.0)
    share = {
        "token_mean": [1 / 5] * 5,
        "seq_mean_token_mean": [1 / 4] * 2 + [1 / 6] * 3,
        "seq_mean_token_sum": [0.5] * 5,
    }
    of_nll = [-0.5 * s for s in share[reduction]]
    expected = [*of_nll[:2], 0, 0, 0, *of_nll[2:], 0, 0]
    assert [a - b for a, b in zip(gradient, plain_gradient, strict=True)] == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("alpha", [0.5, -0.5, 2.0])
def test_the_shaped_reward_by_hand(alpha):
    p = torch.tensor([0.9, 0.5, 0.1])
    assert shaped(p.log(), alpha).tolist() == pytest.approx([(1 - q**-alpha) / alpha for q in p.tolist()], rel=1e-5)
    assert shaped(p.log(), 1e-6).tolist() == pytest.approx(p.log().tolist(), rel=1e-4)  # the limit
    loss, _, metrics = loss_of(CHOSEN + REJECTED, [pair()], alpha=alpha, loss_type="simpo", beta=1.0, nll_coef=0.0)
    chosen, rejected = ((1 - math.exp(alpha * n)) / alpha for n in (1, 2))
    assert loss == pytest.approx(softplus(-(chosen - rejected - 0.5)), rel=1e-5)
    assert (metrics["chosen_reward"], metrics["rejected_reward"]) == pytest.approx((chosen, rejected), rel=1e-5)


@pytest.mark.parametrize("alpha", [0.25, 2.0])
@pytest.mark.parametrize("logprob", [-200.0, -1e4])
def test_the_shaped_reward_continues_along_its_tangent(alpha, logprob):
    leaf = torch.tensor([logprob], requires_grad=True)
    value = shaped(leaf, alpha)
    value.backward()
    assert math.isfinite(value.item())
    assert leaf.grad.item() == pytest.approx(math.exp(EXP_BOUND), rel=1e-5)
    edge = torch.tensor([-EXP_BOUND / alpha], requires_grad=True)
    shaped(edge, alpha).backward()
    assert edge.grad.item() == pytest.approx(leaf.grad.item(), rel=1e-5)  # the two pieces meet


@pytest.mark.parametrize("loss_type", ["sigmoid", "hinge", "ipo", "simpo"])
@pytest.mark.parametrize("alpha", [0.0, 0.25])
@pytest.mark.parametrize(("chosen", "rejected"), [(-1e4, 0.0), (0.0, -1e4), (0.0, 0.0), (-1e4, -1e4)])
def test_log_probs_at_the_extremes(loss_type, alpha, chosen, rejected):
    loss, gradient, metrics = loss_of([chosen] * 2 + [rejected] * 3, [pair()], loss_type=loss_type, alpha=alpha)
    assert all(math.isfinite(v) for v in (loss, *gradient, *metrics.values()))
    if chosen < rejected:
        assert gradient[0] < 0 < gradient[2]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"loss_type": "hinge", "label_smoothing": 0.1},
            "label_smoothing = 0.1 has no effect with loss_type = 'hinge'",
        ),
        ({"loss_type": "ipo", "label_smoothing": 0.1}, "label_smoothing = 0.1 has no effect with loss_type = 'ipo'"),
        ({"gamma": 1.0}, "gamma = 1.0 has no effect with loss_type = 'sigmoid'; leave it at 0.5"),
        ({"nll_coef": 0.0, "nll_reduce": "seq_mean_token_sum"}, "nll_reduce = 'seq_mean_token_sum' has no effect"),
    ],
)
def test_an_option_without_effect_is_refused(config, message):
    with pytest.raises(ValidationError, match=re.escape(message)):
        CPOLoss.Config(**config)
