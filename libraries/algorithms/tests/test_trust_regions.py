"""The losses of ``trust_regions`` against plain statements on padded [B, T] tensors, and by hand."""

from __future__ import annotations

import math

import pytest
import torch
from pydantic import ValidationError
from rlhf_algorithms.trust_regions import DPPO, GMPO, VESPO, Covariance

from libraries.algorithms.tests.test_losses import CORRECTIONS, Statement, one_sequence, run, surrogate


def binary_kl(p, q):
    return p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()


class TestDPPO(Statement):
    loss = DPPO
    configs = (
        DPPO.Config(low=0.02, high=0.01),
        DPPO.Config(divergence="binary_kl", low=1e-3, high=2e-3, weight_max=1.1, entropy_coef=0.01),
    )

    def values(self, x, c):
        p, q, A = x["gen_logprobs"].double().exp(), x["logprobs"].detach().double().exp(), x["advantages"]
        far = (q - p).abs() if c.divergence == "tv" else binary_kl(p, q)
        out = ((A > 0) & (q > p) & (far > c.high)) | ((A < 0) & (q < p) & (far > c.low))
        assert out[x.mask_BT].any()
        assert not out[x.mask_BT].all()
        return -(q / p).clamp(max=c.weight_max) * A * x["logprobs"] * ~out


class TestVESPO(Statement):
    loss = VESPO
    configs = (VESPO.Config(), VESPO.Config(k_positive=1.0, lambda_negative=0.5, aggregation="seq_mean_token_mean"))

    def values(self, x, c):
        d = ((x["logprobs"].detach() - x["gen_logprobs"]).double() * x.mask_BT).sum(1, keepdim=True)
        w, A = d.clamp(min=math.log(1e-8)).exp(), x["advantages"]
        k = torch.where(A >= 0, c.k_positive, c.k_negative).double()
        steep = torch.where(A >= 0, c.lambda_positive, c.lambda_negative).double()
        return -steep.exp() * w**k * (-steep * w).exp() * A * x["logprobs"]


class TestGMPO(Statement):
    loss = GMPO
    configs = (GMPO.Config(), GMPO.Config(clip_low=0.02, clip_high=0.05, correction=CORRECTIONS[1], entropy_coef=0.1))

    def values(self, x, c):
        """Factor by factor: min(rho A, clip(rho) A) divided by A, for each token."""
        rho, A, m = (x["logprobs"] - x["old_logprobs"]).exp(), x["advantages"], x.mask_BT.double()
        clipped = rho.clamp(math.exp(-c.clip_low), math.exp(c.clip_high))
        factor = torch.where(A > 0, torch.min(rho, clipped), torch.where(A < 0, torch.max(rho, clipped), rho))
        mean = ((factor.log() * m).sum(1) / m.sum(1).clamp(min=1)).exp()
        return -mean[:, None] * A


class TestCovariance(Statement):
    loss = Covariance
    configs = (
        Covariance.Config(share=0.2, low=-0.5, high=0.5),
        Covariance.Config(treatment="kl", share=0.3, kl_coef=0.5),
    )

    def values(self, x, c):
        m, A = x.mask_BT, x["advantages"].double()
        logp = x["live_logprobs"].double()
        covariance = (logp - logp[m].mean()) * (A - A[m].mean())
        selected = x["covariance_selected"] > 0
        count = math.ceil(c.share * int(m.sum()))
        rho = (x["logprobs"] - x["old_logprobs"]).exp()
        if c.treatment == "kl":
            assert torch.equal(selected & m, (covariance >= covariance[m].sort().values[-count]) & m)
            return -rho * A + c.kl_coef * selected * rho.log().abs()
        band = (covariance >= c.low) & (covariance <= c.high) & m
        assert int((selected & band).sum()) == min(count, int(band.sum())) == int((selected & m).sum())
        return surrogate(rho, A, c.clip_low, c.clip_high, c.dual_clip) * ~selected


def test_gate_of_vespo_by_hand():
    """A >= 0: phi(w) = w^2 e^(3 (1 - w)), 4 e^-3 at w = 2. A < 0: w^3 e^(2 (1 - w)), 0.125 e at 0.5. w is the product
    of the ratios of two tokens; the loss is the mean of -phi A log q."""
    for w, advantage, gate in ((2.0, 1.0, 4 * math.exp(-3)), (0.5, -1.0, 0.125 * math.e), (1.0, 2.0, 1.0)):
        batch = one_sequence(2, advantages=[advantage] * 2, gen_logprobs=[-2.0, -3.0], old_logprobs=[-2.0, -3.0])
        logprobs = [-2.0 + math.log(w) / 2, -3.0 + math.log(w) / 2]
        total, metrics = run(VESPO(), batch, {"logprobs": logprobs})
        assert metrics["gate"] == pytest.approx(gate, rel=1e-5)
        assert total == pytest.approx(-gate * advantage * sum(logprobs) / 2, rel=1e-5)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DPPO.Config(correction=CORRECTIONS[0]), "in its own ratio"),
        (lambda: VESPO.Config(correction=CORRECTIONS[0]), "in its own ratio"),
        (lambda: Covariance.Config(kl_coef=0.5), "does not use all options that are set; remove kl_coef"),
        (
            lambda: Covariance.Config(treatment="kl", clip_low=0.1),
            "does not use all options that are set; remove clip_low",
        ),
        (lambda: Covariance.Config(low=5.0, high=1.0), "must be below high"),
        (lambda: GMPO.Config(aggregation="token_mean"), "seq_mean_token_mean"),
    ],
)
def test_options_that_would_be_ignored_are_refused(make, message):
    with pytest.raises(ValidationError, match=message):
        make()
