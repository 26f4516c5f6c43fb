"""Every loss against a plain statement on padded [B, T] tensors, and through the conformance suite."""

from __future__ import annotations

import pytest
import torch
from pydantic import ValidationError
from rlhf.errors import TrainingError
from rlhf.ops.loss_value import evaluate, finish_sums
from rlhf.ops.packing import SequenceData, UnitData, pack
from rlhf.ops.reduce import weigh
from rlhf_algorithms.correction import CorrectionConfig
from rlhf_algorithms.critic import Value
from rlhf_algorithms.kl import WithKL
from rlhf_algorithms.policy_losses import CISPO, GSPO, SAPO, PPOLoss, ReinforceLoss
from rlhf_testing.loss import LossContract


def aggregate(values_BT, mask_BT, reduction, length=None):
    m = mask_BT.double()
    live = m.sum(1) > 0
    if reduction == "token_mean":
        return (m * values_BT).sum() / m.sum()
    if reduction == "seq_mean_token_mean":
        return ((m * values_BT).sum(1)[live] / m.sum(1)[live]).mean()
    if reduction == "seq_mean_token_sum":
        return (m * values_BT).sum(1)[live].mean()
    return (m * values_BT).sum() / (int(live.sum()) * length)


def weight(x, correction, b, t):
    """The correction of one token, in plain Python numbers."""
    d = (x["old_logprobs"] - x["gen_logprobs"]).double()
    log_ratios = d[b][x.mask_BT[b]]
    lo, hi = correction.low, correction.high
    mask_weight = lambda w: w if lo <= w <= hi else 0.0  # noqa: E731
    if correction.preset is None and correction.level is None:
        return 1.0
    token = float(d[b, t].exp())
    mean, product = float(log_ratios.mean().exp()), float(log_ratios.sum().exp())
    if correction.preset == "tis":
        return min(max(token, lo), hi)
    if correction.preset == "icepop":
        return mask_weight(token)
    if correction.preset == "seq_mask_tis":
        return min(max(token, lo), hi) if lo <= mean <= hi else 0.0
    if correction.preset == "mis":
        return mask_weight(product)
    if correction.preset == "flash_reinforce":
        p, o = x["gen_logprobs"].double().exp()[b], x["old_logprobs"].double().exp()[b]
        kl = (p * (p / o).log() + (1 - p) * ((1 - p) / (1 - o)).log())[x.mask_BT[b]].mean()
        return token if float(kl) <= hi else 0.0
    value = {"token": token, "sequence_mean": mean, "sequence_product": product}[correction.level]
    return mask_weight(value) if correction.mode == "mask" else min(max(value, lo), hi)


class Statement(LossContract):
    def statement(self, x):
        c = x.config
        values_BT = self.values(x, c)
        if c.correction.active:
            w_BT = torch.zeros_like(values_BT)
            for b in range(w_BT.shape[0]):
                for t in range(w_BT.shape[1]):
                    if x.mask_BT[b, t]:
                        w_BT[b, t] = weight(x, c.correction, b, t)
            values_BT = values_BT * w_BT
        total = aggregate(values_BT, x.mask_BT, c.aggregation, c.max_length)
        if c.entropy_coef is not None:
            total = total - c.entropy_coef * aggregate(x["entropy"], x.mask_BT, c.aggregation, c.max_length)
        return total


def surrogate(rho, A, low, high, dual=None):
    value = torch.min(rho * A, rho.clamp(1 - low, 1 + high) * A)
    if dual is not None:
        value = torch.where(A < 0, torch.max(value, dual * A), value)
    return -value


CORRECTIONS = [
    CorrectionConfig(preset="tis"),
    CorrectionConfig(preset="icepop", low=0.3, high=3.0),
    CorrectionConfig(preset="seq_mask_tis", low=0.3, high=3.0),
    CorrectionConfig(preset="mis", low=0.01, high=100.0),
    CorrectionConfig(level="sequence_mean", mode="truncate", low=0.9, high=1.1),
    CorrectionConfig(level="sequence_product", mode="truncate", low=0.1, high=10.0),
    CorrectionConfig(preset="flash_reinforce", high=0.1),
]


class TestPPO(Statement):
    loss = PPOLoss
    without_effect = {
        "entropy_coef = 0.0": "reports only",
        "correction.low = 0.0": "a divergence has no lower end",
    }
    configs = (
        PPOLoss.Config(),
        PPOLoss.Config(clip_low=0.2, clip_high=0.28, dual_clip=3.0, entropy_coef=0.01),
        PPOLoss.Config(aggregation="seq_mean_token_mean", entropy_coef=0.0),
        PPOLoss.Config(aggregation="seq_mean_token_sum"),
        PPOLoss.Config(aggregation="seq_sum_constant", max_length=64, entropy_coef=0.1),
        *(PPOLoss.Config(correction=c) for c in CORRECTIONS),
    )

    def values(self, x, c):
        rho = (x["logprobs"] - x["old_logprobs"]).exp()
        return surrogate(rho, x["advantages"], c.clip_low, c.clip_high, c.dual_clip)


class TestReinforce(Statement):
    loss = ReinforceLoss
    configs = (
        ReinforceLoss.Config(),
        ReinforceLoss.Config(correction=CORRECTIONS[0], aggregation="seq_mean_token_sum"),
    )

    def values(self, x, c):
        return -x["logprobs"] * x["advantages"]


class TestGSPO(Statement):
    loss = GSPO
    configs = (GSPO.Config(), GSPO.Config(clip_low=0.5, clip_high=0.9, correction=CORRECTIONS[1]))

    def values(self, x, c):
        m = x.mask_BT.double()
        d = ((x["logprobs"] - x["old_logprobs"]) * m).sum(1) / m.sum(1).clamp(min=1)
        return surrogate(d.exp()[:, None].expand_as(m), x["advantages"], c.clip_low, c.clip_high)


class TestCISPO(Statement):
    loss = CISPO
    configs = (CISPO.Config(), CISPO.Config(clip_low=0.2, clip_high=0.2, entropy_coef=0.01))

    def values(self, x, c):
        rho = (x["logprobs"] - x["old_logprobs"]).exp().detach().clamp(1 - c.clip_low, 1 + c.clip_high)
        return -rho * x["advantages"] * x["logprobs"]


class TestSAPO(Statement):
    loss = SAPO
    configs = (SAPO.Config(), SAPO.Config(tau_positive=2.0, aggregation="token_mean", correction=CORRECTIONS[0]))

    def values(self, x, c):
        rho, A = (x["logprobs"] - x["old_logprobs"]).exp(), x["advantages"]
        tau = torch.where(A > 0, c.tau_positive, c.tau_negative).double()
        return -4 / tau / (1 + (-tau * (rho - 1)).exp()) * A


class TestLUSPO(TestGSPO):
    """Every answer's mean times its length."""

    configs = (GSPO.Config(aggregation="seq_mean_token_sum", clip_low=0.5, clip_high=0.9),)


class TestMasks(TestPPO):
    """The loss of the selected tokens, divided by the number of all tokens."""

    configs = (
        PPOLoss.Config(top_entropy=0.2),
        PPOLoss.Config(top_entropy=0.5, entropy_coef=0.1, stale_mask=0.05, aggregation="seq_mean_token_mean"),
        PPOLoss.Config(stale_mask=0.01, correction=CORRECTIONS[0]),
    )

    def values(self, x, c):
        values, m = super().values(x, c), x.mask_BT
        if c.stale_mask is not None:
            moved = [
                float((x["gen_logprobs"] - x["logprobs"])[b][m[b]].mean()) if m[b].any() else 0.0 for b in range(len(m))
            ]
            stale = (torch.tensor(moved) > c.stale_mask)[:, None] & (x["advantages"] < 0)
            assert stale[m].any()
            assert not stale[m].all()
            values = values * ~stale
        if c.top_entropy is not None:
            entropies = x["uncertainty"]
            values = values * (entropies >= torch.quantile(entropies[m], 1 - c.top_entropy))
        return values


class TestValue(LossContract):
    loss = Value
    configs = (Value.Config(), Value.Config(clip=0.0), Value.Config(clip=0.1))

    def statement(self, x):
        V, G = x["values"], x["returns"]
        error = (V - G) ** 2
        if x.config.clip:
            old = x["old_values"]
            error = torch.max(error, (old + (V - old).clamp(-x.config.clip, x.config.clip) - G) ** 2)
        return aggregate(error, x.mask_BT, "token_mean") / 2


class TestKLBeside(Statement):
    loss = PPOLoss
    configs = (PPOLoss.Config(), PPOLoss.Config(aggregation="seq_mean_token_sum"))
    coef = {"kl": 0.3}

    def build(self, config):
        return WithKL(PPOLoss(config), "k3")

    def statement(self, x):
        d = x["logprobs"] - x["ref_logprobs"]
        kl = aggregate((-d).exp() - 1 + d, x.mask_BT, x.config.aggregation)
        rho = (x["logprobs"] - x["old_logprobs"]).exp()
        return aggregate(surrogate(rho, x["advantages"], 0.2, 0.2), x.mask_BT, x.config.aggregation) + 0.3 * kl


class TestUnbiasedKLBeside(TestKLBeside):
    """DeepSeek-V3.2: the estimate times the ratio, whose gradient counts."""

    def build(self, config):
        return WithKL(PPOLoss(config), "k3", unbiased=True)

    def statement(self, x):
        d, rho = x["logprobs"] - x["ref_logprobs"], (x["logprobs"] - x["old_logprobs"]).exp()
        values = surrogate(rho, x["advantages"], 0.2, 0.2) + 0.3 * rho * ((-d).exp() - 1 + d)
        return aggregate(values, x.mask_BT, x.config.aggregation)


class TestKLBesideGSPO(TestKLBeside):
    """KL can be added to any loss: no loss contains code of KL."""

    loss = GSPO
    configs = (GSPO.Config(),)

    def build(self, config):
        return WithKL(GSPO(config), "k2")

    def statement(self, x):
        m = x.mask_BT.double()
        s = (((x["logprobs"] - x["old_logprobs"]) * m).sum(1) / m.sum(1).clamp(min=1)).exp()[:, None].expand_as(m)
        kl = (x["logprobs"] - x["ref_logprobs"]) ** 2 / 2
        values = surrogate(s, x["advantages"], 3e-4, 4e-4) + 0.3 * kl
        return aggregate(values, m > 0, "seq_mean_token_mean")


# ------------------------------------------------------------------------------- numbers by hand


def one_sequence(n, **columns):
    tok = {"loss_mask": [False] + [True] * n, **{k: [0.0, *v] for k, v in columns.items()}}
    return pack([UnitData([SequenceData([1] * (n + 1), tok)])])


def run(loss, batch, outputs, coef=None, live=None):
    batch = weigh(loss.prepare(batch), loss.reduce())
    total, sums = evaluate(loss, batch, {k: torch.tensor(v) for k, v in outputs.items()}, coef or {}, live or {})
    return float(total), finish_sums(sums)


def test_ppo_by_hand():
    """rho = 2, 2, 0.5, 0.5 with A = 1, -1, 1, -1 and clips 0.2 / 0.3: -1.3, 2, -0.5, 0.8; mean 0.25."""
    log2 = 0.6931471805599453
    batch = one_sequence(4, old_logprobs=[-1.0] * 4, advantages=[1.0, -1.0, 1.0, -1.0])
    lp = [-1 + log2, -1 + log2, -1 - log2, -1 - log2]
    total, metrics = run(PPOLoss(PPOLoss.Config(clip_high=0.3)), batch, {"logprobs": lp})
    assert total == pytest.approx((-1.3 + 2 - 0.5 + 0.8) / 4, abs=1e-6)
    assert metrics["clip_fraction"] == 0.5
    assert metrics["ratio"] == pytest.approx(1.25)
    assert metrics["loss/policy"] == pytest.approx(total)


def test_dual_clip_by_hand():
    """rho = e^5, A = -1: plain loss 148.4, with c = 3 it is 3."""
    batch = one_sequence(1, old_logprobs=[-6.0], advantages=[-1.0])
    assert run(PPOLoss(), batch, {"logprobs": [-1.0]})[0] == pytest.approx(148.41316, rel=1e-5)
    assert run(PPOLoss(PPOLoss.Config(dual_clip=3.0)), batch, {"logprobs": [-1.0]})[0] == pytest.approx(3.0)


def test_value_by_hand():
    """V = 2, V_old = 0, G = 3, clip 0.5: max((0.5 - 3)^2, (2 - 3)^2) / 2 = 3.125; without clip 0.5."""
    batch = one_sequence(1, old_values=[0.0], returns=[3.0])
    assert run(Value(), batch, {"values": [2.0]})[0] == pytest.approx(3.125)
    assert run(Value(Value.Config(clip=0.0)), batch, {"values": [2.0]})[0] == pytest.approx(0.5)
    assert Value(Value.Config(clip=0.0)).columns() == ("returns",), "nothing moves from where it stood"
    assert Value(Value.Config(clip=1.0)).columns() == ("returns", "old_values")


def test_a_value_is_clipped_where_it_went_too_far_and_clipping_makes_its_error_larger():
    """V_old = 0, clip 0.5: errors max(6.25, 1), max(6.25, 1), 2.8^2 within the clip, max(0.25, 4)."""
    batch = one_sequence(4, old_values=[0.0] * 4, returns=[3.0, -3.0, 3.0, 0.0])
    total, metrics = run(Value(), batch, {"values": [2.0, -2.0, 0.2, 2.0]})
    assert total == pytest.approx((6.25 + 6.25 + 7.84 + 4.0) / 8)
    assert metrics["value_clip_fraction"] == 0.5
    assert (metrics["value"], metrics["return"]) == (pytest.approx(0.55), 0.75)


def test_cispo_by_hand():
    """rho = 2, 0.25, 6 in [0.5, 5]: weights 2, 0.5, 5 of -A lp."""
    batch = one_sequence(3, old_logprobs=[-3.0] * 3, advantages=[1.0, -1.0, 2.0])
    lp = (torch.tensor([2.0, 0.25, 6.0]).log() - 3).tolist()
    total, metrics = run(CISPO(CISPO.Config(clip_low=0.5, clip_high=4.0)), batch, {"logprobs": lp})
    assert total == pytest.approx((-2 * lp[0] + 0.5 * lp[1] - 10 * lp[2]) / 3, rel=1e-5)
    assert metrics["clip_fraction"] == pytest.approx(2 / 3)
    assert metrics["ratio"] == pytest.approx(8.25 / 3, rel=1e-5)


def test_entropy_is_reported_and_a_bonus_only_where_it_weighs_something():
    batch = one_sequence(2, advantages=[1.0, 3.0])
    outputs = {"logprobs": [-1.0, -2.0], "entropy": [0.5, 1.0]}
    plain, metrics = run(ReinforceLoss(ReinforceLoss.Config(entropy_coef=0.0)), batch, outputs)
    assert (plain, metrics["entropy"], "loss/entropy" in metrics) == (3.5, 0.75, False)
    total, metrics = run(ReinforceLoss(ReinforceLoss.Config(entropy_coef=0.2)), batch, outputs)
    assert total == pytest.approx(3.5 - 0.2 * 0.75)
    assert (metrics["entropy"], metrics["loss/entropy"]) == (0.75, pytest.approx(-0.15))


def test_sapo_by_hand():
    """rho = 2: gates 4 s(1) and (4 / 1.05) s(1.05); d loss / d lp at rho = 1 is that of the plain ratio, -A."""
    log2 = 0.6931471805599453
    batch = one_sequence(2, old_logprobs=[-1.0, -1.0], advantages=[1.0, -3.0])
    total, metrics = run(SAPO(), batch, {"logprobs": [-1 + log2, -1 + log2]})
    assert total == pytest.approx((-4 * 0.7310586 + 3 * 4 / 1.05 * 0.7407749) / 2, abs=1e-5)
    assert metrics["gate"] == pytest.approx((4 * 0.7310586 * 0.2689414 + 4 * 0.7407749 * 0.2592251) / 2, abs=1e-5)


def test_the_least_certain_tokens_push_by_hand():
    """Entropies 0.1, 0.9, 0.5, 0.5, 0.3: a share of 0.4 begins at the quantile 0.6, 0.5, which two tokens have."""
    batch = one_sequence(5, old_logprobs=[-1.0] * 5, advantages=[1.0, 2.0, 4.0, 8.0, 16.0])
    batch = batch.with_column("tok", "uncertainty", torch.tensor([9.0, 0.1, 0.9, 0.5, 0.5, 0.3]))
    loss = PPOLoss(PPOLoss.Config(top_entropy=0.4))
    assert [(a.role, a.output, a.column) for a in loss.prepass()] == [("policy", "entropy", "uncertainty")]
    assert run(loss, batch, {"logprobs": [-1.0] * 5})[0] == pytest.approx(-(2 + 4 + 8) / 5)
    assert PPOLoss().prepass() == ()


@pytest.mark.parametrize("rounded", [0.5, 0.5 + 3e-7, 0.5 - 3e-7])
def test_equal_entropies_push_together_whatever_micro_batches_they_are_computed_in(rounded):
    """The first tokens of a prompt's samples have one distribution. In different micro-batches it is rounded
    differently."""
    batch = one_sequence(5, old_logprobs=[-1.0] * 5, advantages=[1.0, 2.0, 4.0, 8.0, 16.0])
    batch = batch.with_column("tok", "uncertainty", torch.tensor([9.0, 0.1, 0.9, 0.5, rounded, 0.3]))
    total, _ = run(PPOLoss(PPOLoss.Config(top_entropy=0.4)), batch, {"logprobs": [-1.0] * 5})
    assert total == pytest.approx(-(2 + 4 + 8) / 5)


def test_stale_answers_with_negative_advantages_are_masked_by_hand():
    """Sampled at -1, now -1.2 and -1.4 (moved 0.3 on average): the token of a negative advantage drops out."""
    columns = {"gen_logprobs": [-1.0, -1.0], "old_logprobs": [-1.2, -1.4], "advantages": [3.0, -5.0]}
    batch = one_sequence(2, **columns)
    for limit, expected, share in ((0.29, -1.5, 0.5), (0.31, 1.0, 0.0)):
        total, metrics = run(PPOLoss(PPOLoss.Config(stale_mask=limit)), batch, {"logprobs": [-1.2, -1.4]})
        assert (total, metrics["stale_masked"]) == (pytest.approx(expected), share)
    sequence = one_sequence(2, **{**columns, "advantages": [3.0, 0.0]})
    assert run(PPOLoss(PPOLoss.Config(stale_mask=0.29)), sequence, {"logprobs": [-1.2, -1.4]})[1]["stale_masked"] == 0.0
    del columns["gen_logprobs"]  # a generator without log-probs: those of the start of the update, which are now's
    total, _ = run(PPOLoss(PPOLoss.Config(stale_mask=0.1)), one_sequence(2, **columns), {"logprobs": [-1.2, -1.4]})
    assert total == 1.0


def test_cispo_keeps_the_gradient_of_clipped_tokens():
    """rho = e^3 > 5: the weight is 5 and d loss / d lp = -5 A, where the clipped surrogate has none."""
    batch = one_sequence(1, old_logprobs=[-4.0], advantages=[2.0])
    for loss, expected in ((CISPO(), -10.0), (PPOLoss(), 0.0)):
        lp = torch.tensor([-1.0], requires_grad=True)
        total, _ = evaluate(loss, weigh(batch, loss.reduce()), {"logprobs": lp}, {}, {})
        total.backward()
        assert lp.grad.item() == pytest.approx(expected)


@pytest.mark.parametrize("loss", [PPOLoss(), GSPO(), CISPO(), SAPO(), ReinforceLoss()])
def test_live_old_logprobs_give_the_policy_gradient(loss):
    """One optimizer step: old_logprobs is the live output, rho = 1, and every loss has the gradient -A / N."""
    batch = one_sequence(2, advantages=[2.0, 2.0])
    lp = torch.tensor([-1.0, -3.0], requires_grad=True)
    total, sums = evaluate(loss, weigh(batch, loss.reduce()), {"logprobs": lp}, {}, {"old_logprobs": "logprobs"})
    total.backward()
    assert lp.grad.tolist() == pytest.approx([-1.0, -1.0])
    assert finish_sums(sums).get("ratio", 1.0) == 1.0


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("far", [-1e4, 1e4])
@pytest.mark.parametrize("loss", [PPOLoss(), GSPO(), CISPO(), SAPO()])
def test_ratios_without_bounds_stay_finite(loss, far, sign):
    """The sequence ratio had no bound and became inf."""
    batch = one_sequence(2, old_logprobs=[-2e4, -2e4], advantages=[sign, sign])
    lp = torch.tensor([-2e4 + far, -2e4 + far], requires_grad=True)
    total, sums = evaluate(loss, weigh(batch, loss.reduce()), {"logprobs": lp}, {}, {})
    total.backward()
    assert torch.isfinite(total)
    assert torch.isfinite(lp.grad).all()
    if isinstance(loss, PPOLoss) and far > 0 and sign < 0:  # unclipped, drifting up against its advantage: still pushed
        assert (lp.grad > 0).all()
    assert all(abs(v) < float("inf") for v in finish_sums(sums).values())


def test_metrics_of_drift():
    """kl_old and kl_generator are k3 on the right side: e^-d - 1 + d with d = old - now, gen - old."""
    batch = one_sequence(1, old_logprobs=[-1.0], gen_logprobs=[-1.5], advantages=[1.0])
    metrics = run(PPOLoss(), batch, {"logprobs": [-1.2]})[1]
    assert metrics["kl_old"] == pytest.approx(0.0187308, abs=1e-6)  # e^-0.2 - 1 + 0.2
    assert metrics["kl_generator"] == pytest.approx(0.1487213, abs=1e-6)  # e^0.5 - 1 - 0.5
    sequence = one_sequence(1, old_logprobs=[-1.0], advantages=[1.0])
    assert "kl_generator" not in run(PPOLoss(), sequence, {"logprobs": [-1.2]})[1]


def test_masked_tokens_do_not_make_the_others_louder():
    """IcePop masks token 0 (w = e^2 > 5): the mean still divides by 2."""
    batch = one_sequence(2, old_logprobs=[-1.0, -1.0], gen_logprobs=[-3.0, -1.0], advantages=[1.0, 1.0])
    loss = ReinforceLoss(ReinforceLoss.Config(correction=CorrectionConfig(preset="icepop")))
    total, metrics = run(loss, batch, {"logprobs": [-1.0, -1.0]})
    assert total == pytest.approx(0.5)
    assert metrics["correction_masked"] == 0.5


def test_needs_of_the_correction():
    assert not PPOLoss().generator_logprobs
    assert PPOLoss(PPOLoss.Config(correction=CorrectionConfig(preset="tis"))).generator_logprobs
    loss = PPOLoss(PPOLoss.Config(correction=CorrectionConfig(preset="tis")))
    with pytest.raises(TrainingError, match="gen_logprobs"):
        run(loss, one_sequence(1, old_logprobs=[-1.0], advantages=[1.0]), {"logprobs": [-1.0]})


def test_answers_beyond_the_constant_are_refused():
    loss = PPOLoss(PPOLoss.Config(aggregation="seq_sum_constant", max_length=2))
    batch = one_sequence(3, old_logprobs=[-1.0] * 3, advantages=[1.0] * 3)
    with pytest.raises(TrainingError, match=r"3 own tokens.*max_length = 2"):
        loss.prepare(batch)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: PPOLoss.Config(aggregation="seq_sum_constant"), "needs max_length"),
        (lambda: PPOLoss.Config(max_length=3), "do not use it"),
        (lambda: PPOLoss.Config(dual_clip=1.0), "greater than 1"),
        (lambda: GSPO.Config(aggregation="token_mean"), "seq_mean_token_mean"),
        (lambda: CISPO.Config(clip_low=0.0, clip_high=0.0), "use the loss 'reinforce'"),
    ],
)
def test_configs_that_would_be_ignored_are_refused(make, message):
    with pytest.raises(ValidationError, match=message):
        make()
