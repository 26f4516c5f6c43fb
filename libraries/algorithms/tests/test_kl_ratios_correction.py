"""KL estimators and controllers, ratios, corrections, shaping: values by hand, and finite for extreme inputs."""

from __future__ import annotations

import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from rlhf.errors import TrainingError
from rlhf_algorithms.correction import CorrectionConfig, correction_weights, divergence
from rlhf_algorithms.kl import ESTIMATORS, KLController, k1, k2, k3, kl_estimate
from rlhf_algorithms.policy_gradient_config import overlong_penalty, stop_properly
from rlhf_algorithms.ratios import bounded, clipped_surrogate, token_ratio

FAR = [-1e4, -300.0, -88.8, -50.0, -10.0, -3.0, 3.0, 10.0, 88.8, 300.0, 1e4]


def test_estimators_by_hand():
    d = torch.tensor([0.5, -1.0, 0.0])
    assert k1(d).tolist() == [0.5, -1.0, 0.0]
    assert k2(d).tolist() == [0.125, 0.5, 0.0]
    assert k3(d).tolist() == pytest.approx([math.exp(-0.5) - 0.5, math.e - 2, 0.0])


@pytest.mark.parametrize("far", FAR)
@pytest.mark.parametrize("name", ["k1", "k2", "k3"])
def test_the_gradient_is_finite_and_never_zero(name, far):
    """Clamping the result gave NaN below -88 and zero gradient where the drift is largest."""
    lp = torch.tensor([far], requires_grad=True)
    value = kl_estimate(lp, torch.zeros(1), name)
    value.sum().backward()
    assert torch.isfinite(value).all()
    assert torch.isfinite(lp.grad).all()
    assert lp.grad.abs().item() >= 0.5
    assert name == "k1" or lp.grad.item() * far > 0, "the gradient points back to the reference"


@settings(max_examples=60, deadline=None)
@given(st.floats(-1e4, 1e4), st.floats(-1e4, 1e4))
def test_k3_is_convex_and_nonnegative(a, b):
    x, y = torch.tensor([a, b]).double()
    values = k3(torch.stack([x, y, (x + y) / 2]))
    assert (values >= 0).all()
    assert values[2] <= (values[0] + values[1]) / 2 * (1 + 1e-9) + 1e-9


def test_estimators_agree_in_expectation():
    """Over all tokens of two distributions: E[k1] = E[k3] = KL exactly, E[k2] nearly."""
    logits = torch.randn(2, 50, generator=torch.Generator().manual_seed(0)).double() * 0.3
    p, q = torch.log_softmax(logits, 1)
    exact = (p.exp() * (p - q)).sum()
    means = {k: float((p.exp() * f(p - q)).sum()) for k, f in ESTIMATORS.items()}
    assert means["k1"] == pytest.approx(float(exact))
    assert means["k3"] == pytest.approx(float(exact))
    assert means["k2"] == pytest.approx(float(exact), rel=0.2)


def test_adaptive_controller_by_hand_and_over_a_restart():
    """kl 2x the target: e is clipped to 0.2; beta 0.1 * (1 + 0.2 * 64 / 1000) = 0.10128 (defect 18: lost on resume)."""
    c = KLController(0.1, target=0.05, horizon=1000)
    assert c.update(0.1, 64) == pytest.approx(0.10128)
    assert c.update(0.045, 10) == pytest.approx(0.10128 * (1 - 0.1 * 10 / 1000))
    copy = KLController(0.1, target=0.05, horizon=1000)
    copy.load_state_dict(c.state_dict())
    assert copy.update(0.2, 3) == c.update(0.2, 3)
    low = KLController(0.1, target=0.05, horizon=1000)
    assert low.update(0.0, 64) == pytest.approx(0.1 * (1 - 0.2 * 64 / 1000)), "e is clipped to -0.2 too"
    assert low.update(float("nan"), 0) == low.beta == pytest.approx(0.09872), "no trajectories, nothing measured"
    fixed = KLController(0.1)
    assert fixed.update(100.0, 64) == 0.1
    assert (low.adaptive, fixed.adaptive) == (True, False)


def test_controller_refuses_what_would_break_it():
    with pytest.raises(TrainingError, match="horizon must be above 200"):
        KLController(0.1, target=0.1, horizon=100).update(1.0, 1000)
    with pytest.raises(TrainingError, match="horizon must be above 100"):  # at a KL of 0 the coefficient would be 0
        KLController(0.1, target=0.1, horizon=100).update(1.0, 500)
    with pytest.raises(TrainingError, match="finite"):
        KLController(0.1, target=0.1).update(float("nan"), 1)


# ------------------------------------------------------------------------------------------ ratios


@settings(max_examples=80, deadline=None)
@given(st.floats(allow_nan=False, width=32))
def test_bounded_log_ratio(value):
    x = torch.tensor([value], requires_grad=True)
    b = bounded(x)
    b.sum().backward()
    assert b.item() == pytest.approx(min(max(value, -20.0), 20.0))
    assert torch.isfinite(x.grad).all()
    assert math.isinf(value) or x.grad.item() == 1.0


def test_surrogate_by_hand():
    ratio = torch.tensor([1.5, 1.5, 0.5, 0.5, 1.0])
    A = torch.tensor([2.0, -2.0, 2.0, -2.0, 2.0])
    values, clipped = clipped_surrogate(ratio, A, 0.2, 0.3)
    assert values.tolist() == pytest.approx([-2.6, 3.0, -1.0, 1.6, -2.0])
    assert clipped.tolist() == [True, False, False, True, False]
    values, clipped = clipped_surrogate(torch.tensor([9.0, 9.0]), torch.tensor([-1.0, 1.0]), 0.2, 0.2, dual_clip=3.0)
    assert values.tolist() == pytest.approx([3.0, -1.2])
    assert clipped.tolist() == [True, True]
    values, clipped = clipped_surrogate(torch.tensor([9.0, 2.0]), torch.tensor([-0.5, -0.5]), 0.2, 0.2, dual_clip=3.0)
    assert values.tolist() == pytest.approx([1.5, 1.0]), "at most 3 times the size of the advantage"
    assert clipped.tolist() == [True, False]


@pytest.mark.parametrize("advantage", [2.0, -2.0])
def test_a_first_step_has_its_gradient_with_a_clip_of_zero(advantage):
    ratio = torch.ones(1, requires_grad=True)
    values, _ = clipped_surrogate(ratio, torch.tensor([advantage]), 0.0, 0.0)
    values.sum().backward()
    assert ratio.grad.item() == -advantage


def test_ratio_is_one_on_policy():
    lp = torch.tensor([-3.0, -700.0])
    assert token_ratio(lp, lp).tolist() == [1.0, 1.0]


# -------------------------------------------------------------------------------------- correction


def weights(d, config, sequence=None):
    gen = torch.full((len(d),), -2.0)
    index = torch.zeros(len(d), dtype=torch.int64) if sequence is None else torch.tensor(sequence)
    return correction_weights(gen + torch.tensor(d), gen, index, int(index.max()) + 1, config).tolist()


LN = math.log


def test_presets_by_hand():
    d = [LN(8.0), LN(1.0), LN(0.25), LN(2.0)]
    sequence = [0, 0, 1, 1]  # geometric means 2.83 and 0.71; products 8 and 0.5
    assert weights(d, CorrectionConfig(preset="tis"), sequence) == pytest.approx([5.0, 1.0, 0.5, 2.0])
    assert weights(d, CorrectionConfig(preset="icepop"), sequence) == pytest.approx([0.0, 1.0, 0.0, 2.0])
    assert weights(d, CorrectionConfig(preset="mis", low=0.4), sequence) == pytest.approx([0.0, 0.0, 0.5, 0.5])
    narrow = CorrectionConfig(preset="seq_mask_tis", low=0.5, high=2.5)
    assert weights(d, narrow, sequence) == pytest.approx([0.0, 0.0, 0.5, 2.0])
    mean = CorrectionConfig(level="sequence_mean", mode="truncate", low=0.9, high=2.0)
    assert weights(d, mean, sequence) == pytest.approx([2.0, 2.0, 0.9, 0.9])
    out = CorrectionConfig(level="sequence_mean", mode="mask", high=2.0)
    assert weights(d, out, sequence) == pytest.approx([0.0, 0.0, 0.5**0.5, 0.5**0.5])
    assert weights(d, CorrectionConfig(level="token", mode="mask"), sequence) == pytest.approx([0.0, 1.0, 0.0, 2.0])
    for end in ({"low": 1.0}, {"high": 1.0}):
        assert weights([0.0], CorrectionConfig(preset="icepop", **end)) == [1.0], "its ends belong to the band"


MASKED = {"level": "token", "mode": "mask"}


def test_divergences_by_hand():
    """p = 0.5 and o = 0.25: tv 0.25, KL(p, o) = 0.5 ln 2 + 0.5 ln(0.5 / 0.75), KL(o, p) = 0.25 ln 0.5 + 0.75 ln 1.5."""
    gen, old = torch.tensor([LN(0.5)]), torch.tensor([LN(0.25)])
    forward, reverse = 0.5 * LN(2) + 0.5 * LN(2 / 3), 0.25 * LN(0.5) + 0.75 * LN(1.5)
    values = {"tv": 0.25, "binary_kl": forward, "binary_kl_both": max(forward, reverse)}
    assert forward > reverse
    for statistic, value in values.items():
        assert divergence(gen, old, statistic).item() == pytest.approx(value)
        assert divergence(gen, gen, statistic).item() == 0.0
    assert divergence(old, gen, "binary_kl_both").item() == pytest.approx(forward), "the larger of both directions"
    for far in (-1e4, 0.0):
        assert math.isfinite(divergence(torch.tensor([far]), gen, "binary_kl").item())


def openrlhf(old_BT, gen_BT, mask_BT, level, mode, gating, low, high):
    """The weights of OpenRLHF 0.11.2 (``is_correction_*``), stated again for padded tensors."""
    w_BT, m_BT = (old_BT - gen_BT).exp(), mask_BT.double()
    p_BT, o_BT = gen_BT.exp(), old_BT.exp()
    statistic_BT = {
        "ratio": old_BT - gen_BT,
        "binary_kl": p_BT * (gen_BT - old_BT) + (1 - p_BT) * ((1 - p_BT).log() - (1 - o_BT).log()),
        "tv": (p_BT - o_BT).abs(),
    }[gating]
    if level == "seq":
        statistic_BT = ((statistic_BT * m_BT).sum(1) / m_BT.sum(1))[:, None].expand_as(w_BT)
    if gating == "ratio":
        statistic_BT = statistic_BT.exp()
    if mode == "clip":
        return statistic_BT.clamp(low, high)
    return w_BT * ((statistic_BT >= low) & (statistic_BT <= high))


@pytest.mark.parametrize(
    ("peer_options", "options"),
    [
        (("token", "clip", "ratio", 0.8, 1.2), {"preset": "tis", "low": 0.8, "high": 1.2}),
        (("token", "mask", "ratio", 0.8, 1.2), {"preset": "icepop", "low": 0.8, "high": 1.2}),
        (("token", "mask", "tv", 0.0, 0.02), {**MASKED, "statistic": "tv", "high": 0.02}),
        (("token", "mask", "binary_kl", 0.0, 1e-3), {**MASKED, "statistic": "binary_kl", "high": 1e-3}),
        (("seq", "mask", "binary_kl", 0.0, 5e-3), {"preset": "flash_reinforce"}),
        (("seq", "mask", "tv", 0.0, 0.04), {"level": "sequence_mean", "mode": "mask", "statistic": "tv", "high": 0.04}),
    ],
)
def test_weights_are_those_of_openrlhf(peer_options, options):
    generator = torch.Generator().manual_seed(3)
    gen_BT = -torch.rand(40, 12, generator=generator).double() * 3 - 0.05
    spread_B1 = torch.rand(40, 1, generator=generator).double() * 0.4  # answers that are far and near
    old_BT = (gen_BT + torch.randn(40, 12, generator=generator).double() * spread_B1).clamp(max=-0.01)
    mask_BT = torch.arange(12) < torch.randint(1, 13, (40, 1), generator=generator)
    sequence_A = torch.arange(40)[:, None].expand(40, 12)[mask_BT]
    weights_A = correction_weights(old_BT[mask_BT], gen_BT[mask_BT], sequence_A, 40, CorrectionConfig(**options))
    stated_A = openrlhf(old_BT, gen_BT, mask_BT, *peer_options)[mask_BT]
    assert weights_A.double() == pytest.approx(stated_A, rel=1e-5, abs=1e-6)
    assert 0.05 < float((stated_A == 0).double().mean() if peer_options[1] == "mask" else 0.5) < 0.95


def test_kpop_masks_tokens_that_are_far_in_either_direction():
    """At p = 0.999 and o = 0.05 KL(p, o) is 2.98, and 6.2 the other way; at 0.9 and 0.5 it is 0.37 and 0.51."""
    gen = torch.tensor([LN(0.999), LN(0.05), LN(0.9), LN(0.97)])
    old = torch.tensor([LN(0.05), LN(0.999), LN(0.5), LN(0.1)])  # KL(0.97, 0.1) = 2.10, KL(0.1, 0.97) = 2.83
    index = torch.arange(4)
    config = CorrectionConfig(preset="kpop", high=2.5)
    assert correction_weights(old, gen, index, 4, config).tolist() == pytest.approx([0.0, 0.0, 5 / 9, 0.0])
    one_way = CorrectionConfig(**MASKED, statistic="binary_kl", high=2.5)
    assert correction_weights(old, gen, index, 4, one_way).tolist() == pytest.approx([0.0, 0.0, 5 / 9, 0.1 / 0.97])


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.floats(width=32), min_size=1, max_size=6),
    st.one_of(
        st.sampled_from(["tis", "icepop", "seq_mask_tis", "mis"]),
        st.tuples(
            st.sampled_from(["token", "sequence_mean", "sequence_product"]), st.sampled_from(["truncate", "mask"])
        ),
    ),
)
def test_weights_are_zero_or_within_the_band(d, what):
    """Sequence-masked weights were not clamped; inf and 0 x inf were possible."""
    config = CorrectionConfig(preset=what) if isinstance(what, str) else CorrectionConfig(level=what[0], mode=what[1])
    for w in weights(d, config):
        assert w == 0.0 or config.low - 1e-6 <= w <= config.high + 1e-6


def test_mis_is_one_sided_as_published():
    """Sequences of 2000 tokens with log-ratios of deviation 0.02: their products have deviation 0.9 in the log."""
    config = CorrectionConfig(preset="mis")
    assert (config.low, config.high) == (0.0, 3.0)
    noise = torch.randn(100, 2000, generator=torch.Generator().manual_seed(0)) * 0.02
    d = (noise - 0.0002).reshape(-1)  # E[exp] = 1: the samples are those of the generator
    sequence = [n for n in range(100) for _ in range(2000)]
    masked = (torch.tensor(weights(d.tolist(), config, sequence)) == 0).float().mean()
    two_sided = CorrectionConfig(preset="mis", low=0.5, high=5.0)
    assert masked < 0.1
    assert (torch.tensor(weights(d.tolist(), two_sided, sequence)) == 0).float().mean() > 0.25
    assert CorrectionConfig.model_validate(config.model_dump()) == config
    assert (two_sided.low, two_sided.high) == (0.5, 5.0)
    for other in ("tis", "icepop", "seq_mask_tis"):
        assert (CorrectionConfig(preset=other).low, CorrectionConfig(preset=other).high) == (0.5, 5.0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"preset": "tis", "level": "token"}, "preset 'tis' already sets level, mode and statistic"),
        ({"preset": "tis", "mode": "mask"}, "preset 'tis' already sets level, mode and statistic"),
        ({"level": "token"}, "a correction needs both, or a preset"),
        ({"mode": "mask"}, "a correction needs both, or a preset"),
        ({"low": 0.4}, "no correction is enabled"),
        ({"high": 4.0}, "no correction is enabled"),
        ({"preset": "mis", "low": 5.0}, r"low < high, got \[5.0, 3.0\]"),
        ({"preset": "kpop", "statistic": "tv"}, "preset 'kpop' already sets"),
        ({"statistic": "tv", "high": 0.1}, "no correction is enabled"),
        ({**MASKED, "statistic": "tv"}, "needs high"),
        ({**MASKED, "statistic": "tv", "high": 1.0}, "nothing would be masked"),
        ({**MASKED, "statistic": "binary_kl", "high": 0.1, "low": 0.01}, "only an upper bound"),
        ({"level": "token", "mode": "truncate", "statistic": "tv", "high": 0.1}, "a divergence is not a weight"),
        ({"level": "sequence_product", "mode": "mask", "statistic": "binary_kl", "high": 0.1}, "has no product"),
    ],
)
def test_incomplete_or_contradictory_corrections_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        CorrectionConfig(**options)


def test_a_log_ratio_that_is_not_a_number_weighs_nothing_and_leaves_its_sequence_alone():
    nan, d = float("nan"), [float("nan"), LN(2.0), LN(3.0)]
    assert weights(d, CorrectionConfig(preset="kpop")) == pytest.approx([0.0, 2.0, 3.0])
    assert weights(d, CorrectionConfig(preset="flash_reinforce", high=0.5)) == pytest.approx([0.0, 2.0, 3.0])
    assert weights(d, CorrectionConfig(preset="tis")) == pytest.approx([0.0, 2.0, 3.0])
    assert weights(d, CorrectionConfig(preset="icepop")) == pytest.approx([0.0, 2.0, 3.0])
    assert weights(d, CorrectionConfig(preset="mis", high=7.0)) == pytest.approx([0.0, 6.0, 6.0])
    far = CorrectionConfig(level="sequence_mean", mode="mask", statistic="tv", high=0.2)  # (0 + 0.14 + 0.27) / 3 = 0.14
    assert weights(d, far) == pytest.approx([0.0, 2.0, 3.0])
    mean = CorrectionConfig(level="sequence_mean", mode="truncate")
    assert weights([nan, LN(4.0)], mean) == pytest.approx([0.0, 2.0])
    assert weights([float("inf"), -float("inf")], CorrectionConfig(preset="mis")) == [1.0, 1.0], (
        "finite, so they cancel"
    )


def test_log_ratios_are_bounded_before_exp():
    wide = {"low": 0.0, "high": 1e12}
    assert weights([30.0, -30.0], CorrectionConfig(preset="tis", **wide)) == pytest.approx([math.e**20, math.e**-20])
    product = CorrectionConfig(level="sequence_product", mode="truncate", **wide)
    assert weights([15.0, 10.0], product) == pytest.approx([math.e**20] * 2)


def test_weights_carry_no_gradient():
    old = torch.tensor([-1.0], requires_grad=True)
    index = torch.zeros(1, dtype=torch.int64)
    assert not correction_weights(old, torch.tensor([-1.5]), index, 1, CorrectionConfig(preset="tis")).requires_grad


# ----------------------------------------------------------------------------------------- shaping


def test_overlong_by_hand():
    lengths = torch.tensor([0, 80, 81, 90, 100, 150])
    assert overlong_penalty(lengths, 100, 20).tolist() == pytest.approx([0, 0, -0.05, -0.5, -1, -1])
    assert overlong_penalty(lengths, 100, 20, 0.5).tolist() == pytest.approx([0, 0, -0.025, -0.25, -0.5, -0.5])


def test_stop_properly_by_hand():
    r, cut = torch.tensor([1.0, 1.0, -2.0]).double(), torch.tensor([False, True, True])
    assert stop_properly(r, cut, 0.25).tolist() == [1.0, 0.25, -0.5]
    assert stop_properly(r, cut, 0.0).tolist() == [1.0, 0.0, 0.0]
    assert stop_properly(r, cut, -1.5).tolist() == [1.0, -1.5, -1.5]
