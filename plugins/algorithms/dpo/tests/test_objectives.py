"""The formulas at their limits and at log-ratios of +-1e4. ``test_contract.py`` states each of them again."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from rlhf_plugin_dpo import objectives as o

LN2 = math.log(2)
BETA = 0.5


def at(value: float) -> torch.Tensor:
    return torch.tensor([value], dtype=torch.float64)


@pytest.mark.parametrize("alpha", [1.0, 1 + 1e-12])
def test_the_alpha_divergence_has_its_limit_at_1(alpha):
    assert o.divergence_score(at(LN2), "alpha_divergence", alpha).item() == pytest.approx(LN2, rel=1e-9)


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
