"""The formulas against numbers worked out by hand, at their limits, and at log-ratios of +-1e4."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from rlhf_plugin_dpo import objectives as o

LN2, LN3 = math.log(2), math.log(3)


def at(value: float) -> torch.Tensor:
    return torch.tensor([value], dtype=torch.float64)


# With beta = 1/2 a margin of 2 ln 3 makes beta h = ln 3, sigmoid 3/4, and -2 ln 3 makes it 1/4.
BETA, H = 0.5, 2 * LN3

BY_HAND = {
    "sigmoid": (o.sigmoid(at(H), BETA), math.log(4 / 3)),
    "sigmoid of nothing learnt": (o.sigmoid(at(0.0), BETA), LN2),
    "conservative": (o.sigmoid(at(H), BETA, 0.25), 0.75 * math.log(4 / 3) + 0.25 * math.log(4)),
    "robust": (o.robust(at(H), BETA, 0.25), (0.75 * math.log(4 / 3) - 0.25 * math.log(4)) / 0.5),
    "robust without noise": (o.robust(at(H), BETA, 0.0), math.log(4 / 3)),
    "hinge": (o.hinge(at(1.0), BETA), 0.5),
    "hinge beyond its margin": (o.hinge(at(3.0), BETA), 0.0),
    "ipo": (o.ipo(at(3.0), BETA), (3 - 1) ** 2),
    "ipo at its target": (o.ipo(at(5.0), 0.1), 0.0),
    "exo_pair": (o.exo_pair(at(H), BETA, 0.1), 0.75 * math.log(0.75 / 0.9) + 0.25 * math.log(0.25 / 0.1)),
    "exo_pair at its target": (o.exo_pair(at(2 * math.log(9)), BETA, 0.1), 0.0),
    "discopop": (o.discopop(at(H), BETA, 1.0), 0.25 * math.log(4 / 3) + 0.75 / 3),
    "discopop, tau = 1/2": (o.discopop(at(H), BETA, 0.5), 0.1 * math.log(4 / 3) + 0.9 / 3),
    "nca_pair": (o.nca_pair(at(H), at(-H), BETA), math.log(4 / 3) + (math.log(4) + math.log(4 / 3)) / 2),
    "bco_pair": (o.bco_pair(at(H), at(-H), BETA), 2 * math.log(4 / 3)),
    "bco_pair, shifted": (o.bco_pair(at(H), at(-H), BETA, LN3), LN2 + math.log(10 / 9)),
    "sppo_hard": (o.sppo_hard(at(3.0), at(-2.0), BETA), (3 - 1) ** 2 + (-2 + 1) ** 2),
    "apo_zero": (o.apo_zero(at(H), at(-H), BETA), 0.25 + 0.25),
    "apo_down": (o.apo_down(at(-H), at(-2 * H), BETA), 0.25 + 0.25),
    "reverse_kl": (o.divergence_score(at(LN2), "reverse_kl"), LN2),
    "forward_kl": (o.divergence_score(at(LN2), "forward_kl"), 1 - 0.5),
    "js_divergence": (o.divergence_score(at(LN2), "js_divergence"), math.log(4 / 3)),
    "alpha_divergence": (o.divergence_score(at(math.log(4)), "alpha_divergence", 0.5), (0.5 - 1) / -0.5),
    "alpha_divergence, alpha = 1": (o.divergence_score(at(LN2), "alpha_divergence", 1.0), LN2),
    "alpha_divergence near 1": (o.divergence_score(at(LN2), "alpha_divergence", 1 + 1e-12), LN2),
}


@pytest.mark.parametrize(("value", "expected"), BY_HAND.values(), ids=BY_HAND.keys())
def test_by_hand(value, expected):
    assert value.tolist() == pytest.approx([expected], rel=1e-9, abs=1e-12)


FORMULAS = {
    "sigmoid": lambda c, r: o.sigmoid(c - r, 0.1, 0.1),
    "robust": lambda c, r: o.robust(c - r, 0.1, 0.1),
    "hinge": lambda c, r: o.hinge(c - r, 0.1),
    "ipo": lambda c, r: o.ipo(c - r, 0.1),
    "exo_pair": lambda c, r: o.exo_pair(c - r, 0.1, 1e-3),
    "discopop": lambda c, r: o.discopop(c - r, 0.1, 0.05),
    "discopop, tau = 1": lambda c, r: o.discopop(c - r, 0.1, 1.0),
    "nca_pair": lambda c, r: o.nca_pair(c, r, 0.1),
    "bco_pair": lambda c, r: o.bco_pair(c, r, 0.1, 0.3),
    "sppo_hard": lambda c, r: o.sppo_hard(c, r, 0.1),
    "apo_zero": lambda c, r: o.apo_zero(c, r, 0.1),
    "apo_down": lambda c, r: o.apo_down(c, r, 0.1),
    **{
        f"{name}, alpha = {alpha}": lambda c, r, name=name, alpha=alpha: o.ipo(
            o.divergence_score(c, name, alpha) - o.divergence_score(r, name, alpha), 0.1
        )
        for name, alpha in (
            ("forward_kl", 0.5),
            ("js_divergence", 0.5),
            ("alpha_divergence", 0.5),
            ("alpha_divergence", 2.0),
        )
    },
}


@pytest.mark.parametrize("formula", FORMULAS.values(), ids=FORMULAS.keys())
def test_finite_in_single_precision(formula):
    for c, r in itertools.product((-1e4, -300.0, 0.0, 300.0, 1e4), (-1e4, 0.0, 1e4)):
        chosen, rejected = (torch.tensor([v], requires_grad=True) for v in (c, r))
        value = formula(chosen, rejected)
        assert value.dtype == torch.float32
        assert bool(value.isfinite().all()), (c, r)
        for gradient in torch.autograd.grad(value.sum(), (chosen, rejected), allow_unused=True):
            assert gradient is None or bool(gradient.isfinite().all()), (c, r)


def test_a_lost_pair_keeps_its_gradient():
    """At large margins of the wrong sign the losses that are linear there have a gradient of size beta."""
    for formula in (lambda h: o.sigmoid(h, 0.1), lambda h: o.hinge(h, 0.1), lambda h: o.discopop(h, 0.1, 0.05)):
        h = torch.tensor([-1e4], requires_grad=True)
        (gradient,) = torch.autograd.grad(formula(h).sum(), h)
        assert gradient.tolist() == pytest.approx([-0.1])


def test_robust_is_unbiased_under_flipped_labels():
    """The mean over labels flipped with probability eps is the loss of the clean label."""
    h, eps = at(1.7), 0.2
    noisy = (1 - eps) * o.robust(h, BETA, eps) + eps * o.robust(-h, BETA, eps)
    assert noisy.tolist() == pytest.approx(o.sigmoid(h, BETA).tolist())


def test_every_divergence_is_that_of_its_generator():
    """f'(u) up to a constant, by differentiating f(u) itself."""
    generators = {
        "reverse_kl": lambda u: u * u.log(),
        "forward_kl": lambda u: -u.log() + u,
        "js_divergence": lambda u: u * u.log() - (u + 1) * ((u + 1) / 2).log(),
        "alpha_divergence": lambda u: (u**0.3 - 0.3 * u) / (0.3 * (0.3 - 1)),
    }
    u = torch.tensor([0.2, 1.0, 3.0], dtype=torch.float64, requires_grad=True)
    for name, f in generators.items():
        (slope,) = torch.autograd.grad(f(u).sum(), u)
        difference = o.divergence_score(u.detach().log(), name, 0.3) - slope
        assert (difference - difference[0]).abs().max() < 1e-12, name
