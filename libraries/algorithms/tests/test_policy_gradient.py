"""The base of the policy-gradient algorithms: needs, annotations, updates and adaption follow from the config."""

from __future__ import annotations

import pytest
import torch
from pydantic import ValidationError
from rlhf.errors import ConfigError, TrainingError
from rlhf.interfaces import Advantage, Loss
from rlhf.ops.returns import gae, return_to_go
from rlhf.types import (
    Annotation,
    Group,
    LossOutput,
    OnlineShape,
    Reduce,
    RewardResult,
    Row,
    RunOptions,
    Snapshot,
    Trajectory,
    Turn,
    Update,
)
from rlhf_algorithms.advantages import GDPO, RAE
from rlhf_algorithms.critic import ValueScale
from rlhf_algorithms.kl import WithKL
from rlhf_algorithms.policy_gradient import BOOTSTRAP, PolicyGradient
from rlhf_algorithms.policy_gradient_config import KLConfig, PolicyGradientConfig, ShapingConfig, TeacherConfig
from rlhf_testing import fabricate


class Plain(Advantage):
    name = "plain"

    def returns(self, R_NA, mask_NA, values_NA, boot_N):
        G_NA = return_to_go(R_NA, mask_NA, 1.0)
        return G_NA, G_NA


class Critic(Plain):
    name = "with_critic"
    needs_values = True

    def returns(self, R_NA, mask_NA, values_NA, boot_N):
        return gae(R_NA, values_NA, mask_NA, boot_N, 1.0, 1.0)


class Ratio(Loss):
    name = "ratio"

    def outputs(self):
        return ("logprobs",)

    def columns(self):
        return ("advantages", "old_logprobs")

    def reduce(self):
        return {"policy": Reduce()}

    def __call__(self, x):
        return LossOutput({"policy": -(x["logprobs"] - x["old_logprobs"]).exp() * x["advantages"]})


class NoRatio(Ratio):
    generator_logprobs = True

    def columns(self):
        return ("advantages",)


class Mine(PolicyGradient):
    name = "mine"


def build(advantage=Plain, loss=Ratio, run=None, **config):
    return Mine(Mine.Config(**config), {"advantage": advantage(), "loss": loss(), "value_loss": Ratio()}, run)


OLD = Annotation("policy", "logprobs", "old_logprobs")
REF = Annotation("reference", "logprobs", "ref_logprobs")
VALUES = Annotation("critic", "values", "old_values")
LIVE = {"old_logprobs": "logprobs"}


@pytest.mark.parametrize(
    ("algorithm", "roles", "annotations", "updates"),
    [
        (build(), ["policy"], [], [Update("policy", "loss", live=LIVE)]),
        (build(epochs=2), ["policy"], [OLD], [Update("policy", "loss", epochs=2)]),
        (build(minibatches=3), ["policy"], [OLD], [Update("policy", "loss", minibatches=3)]),
        (build(loss=NoRatio, epochs=2), ["policy"], [], [Update("policy", "loss", 2)]),
        (build(kl=KLConfig(coef=0.1)), ["policy", "reference"], [OLD, REF], [Update("policy", "loss")]),
        (
            build(kl=KLConfig(coef=0.1, where="loss")),
            ["policy", "reference"],
            [REF],
            [Update("policy", "loss", coef={"kl": 0.1}, live=LIVE)],
        ),
        (
            build(Critic, bootstrap_truncated=True),
            ["policy", "critic"],
            [VALUES, Annotation("critic", BOOTSTRAP, "bootstrap")],
            [Update("critic", "value_loss"), Update("policy", "loss", live=LIVE)],
        ),
    ],
)
def test_declarations_follow_from_the_config(algorithm, roles, annotations, updates):
    assert [r.name for r in algorithm.needs().roles] == roles
    assert algorithm.annotations(0) == annotations
    assert algorithm.updates(0) == updates


def test_the_running_mean_takes_shaped_rewards_and_no_kl():
    algorithm = build(RAE, shaping=ShapingConfig(stop_properly=0.0))
    batch, _ = algorithm.assemble(fabricate.groups(0))
    algorithm.finish(0, batch, {})
    expected = RAE()
    r_U = torch.where(batch.unit["truncated"], 0.0, batch.unit["reward"])
    expected.update_statistics(r_U, batch.unit["group"], batch.unit["key"], batch.unit["sample"])
    assert algorithm.advantage.means == expected.means
    assert len(expected.means) == 1, "one source"
    with pytest.raises(ConfigError, match="before_baseline"):
        build(RAE, kl=KLConfig(coef=0.1, before_baseline=True))

    class Own(Mine):
        def finish(self, step, batch, metrics):
            return {}

    with pytest.raises(ConfigError, match=r"super\(\).finish\(\)"):
        Own(parts=algorithm.parts)


def test_a_row_without_the_column_of_the_running_mean_is_named():
    algorithm = build(lambda: RAE(RAE.Config(by=("player",))))
    with pytest.raises(TrainingError, match=r"row 0 of 'fabricated' has no column 'player'"):
        algorithm.assemble(fabricate.groups(0))


TEACHER = Annotation("teacher", "logprobs", "teacher_logprobs")


def taught(loss=Ratio, **teacher):
    return build(loss=loss, teacher=TeacherConfig(coef=0.5, **teacher))


def test_a_teacher_is_a_frozen_role_that_annotates():
    algorithm = taught()
    assert [(r.name, r.trained) for r in algorithm.needs().roles] == [("policy", True), ("teacher", False)]
    assert algorithm.annotations(0) == [OLD, TEACHER]
    assert algorithm.needs().reward
    assert not taught(task=False).needs().reward


@pytest.mark.parametrize("task", [True, False])
def test_the_credit_of_a_teacher_is_added_to_each_token(task):
    algorithm = taught(task=task)
    batch, _ = algorithm.assemble(fabricate.groups(0))
    values_N = torch.linspace(-3, -1, batch.tokens)
    batch = batch.with_column("tok", "old_logprobs", values_N).with_column("tok", "teacher_logprobs", values_N.flip(0))
    base_N = build().credit(build().assemble(fabricate.groups(0))[0])[0].tok["advantages"]
    batch, metrics = algorithm.credit(batch)
    mask_N = batch.tok["loss_mask"]
    gap_N = torch.where(mask_N, values_N.flip(0) - values_N, 0.0)
    credit_N = 0.5 * gap_N + (base_N if task else 0.0)
    assert torch.allclose(batch.tok["advantages"], credit_N, atol=1e-6)
    assert metrics["teacher/kl"] == pytest.approx(-float(gap_N[mask_N].mean()), rel=1e-5)
    assert ("reward/mean" in metrics) == task
    assert "length/mean" in metrics


def test_options_of_a_reward_that_is_left_out_are_refused():
    for options in (
        {"reward_clip": (-1.0, 1.0)},
        {"kl": KLConfig(coef=0.1)},
        {"shaping": ShapingConfig(stop_properly=0)},
    ):
        with pytest.raises(ValidationError, match=r"teacher.task = false does not use the reward"):
            build(teacher=TeacherConfig(coef=1.0, task=False), **options)
    with pytest.raises(ValidationError, match="coef = 0 turns off"):
        TeacherConfig(task=False)
    with pytest.raises(ConfigError, match="choose an advantage without values"):
        build(Critic, teacher=TeacherConfig(coef=1.0, task=False))


def test_generator_logprobs_are_needed_where_the_loss_says_so():
    assert not build().needs().generator_logprobs
    assert build(loss=NoRatio).needs().generator_logprobs
    assert build(loss=NoRatio, kl=KLConfig(coef=1.0, where="loss")).needs().generator_logprobs


def test_critic_warmup_is_exactly_n_steps():
    """A warm-up of N froze the policy for N + 1 steps."""
    algorithm = build(Critic, critic_warmup=2)
    roles = [[u.role for u in algorithm.updates(step)] for step in range(4)]
    assert roles == [["critic"], ["critic"], ["critic", "policy"], ["critic", "policy"]]


def test_the_kl_coefficient_is_constant_during_critic_warmup():
    """At that time the policy equals its reference: a KL of 0 would lower beta before the first update."""
    algorithm = build(Critic, critic_warmup=2, kl=KLConfig(coef=0.1, target=0.25, horizon=100.0))
    batch, _ = algorithm.assemble(fabricate.groups(0))
    assert batch.units == 12
    for step, beta in enumerate([0.1, 0.1, 0.1 * (1 - 0.2 * 12 / 100)]):
        assert algorithm.finish(step, batch, {"kl/reference": 0.0}) == {"kl/coef": 0.1}
        assert algorithm.kl.beta == pytest.approx(beta, rel=1e-12)


def test_a_short_batch_has_one_minibatch_per_sample():
    """The batch has twelve samples, fewer than the config says; the schedule is planned with the config's number."""
    algorithm = build(minibatches=20, epochs=2)
    batch, _ = algorithm.credit(algorithm.assemble(fabricate.groups(0))[0])
    [update] = algorithm.updates(0, batch)
    assert (update.minibatches, update.epochs) == (12, 2)
    assert algorithm.updates(0)[0].minibatches == 20


@pytest.mark.parametrize(
    ("config", "shape", "says"),
    [
        ({"minibatches": 8}, OnlineShape(8, 9, 99), None),
        ({"minibatches": 9}, OnlineShape(8, 9, 99), "--algorithm.minibatches 8 or less"),
        ({"kl": KLConfig(coef=0.1, target=1.0, horizon=1.7)}, OnlineShape(8, 9, 99), None),
        ({"kl": KLConfig(coef=0.1, target=1.0, horizon=1.6)}, OnlineShape(8, 9, 99), "horizon above 1.6"),
        ({"shaping": ShapingConfig(overlong_buffer=4, overlong_max=12)}, OnlineShape(8, 9, 9), None),
        (
            {"shaping": ShapingConfig(overlong_buffer=4, overlong_max=13)},
            OnlineShape(8, 9, 9),
            "begins above overlong_max - overlong_buffer = 9 tokens, but no answer has more than 9",
        ),
        ({"shaping": ShapingConfig(overlong_buffer=4, overlong_max=13)}, OnlineShape(8, 9, 99), None),
    ],
)
def test_options_that_do_not_fit_the_batches_are_refused_before_the_run(config, shape, says):
    messages = build(**config).conflicts(shape)
    assert not messages if says is None else says in " ".join(messages)


@pytest.mark.parametrize("field", [{"critic_warmup": 1}, {"bootstrap_truncated": True}, {"normalise_values": True}])
def test_options_of_a_critic_need_one(field):
    with pytest.raises(ConfigError, match="does not use; remove this option"):
        build(**field)


def test_kl_as_a_loss_is_a_term_beside_any_loss():
    algorithm = build(kl=KLConfig(coef=0.1, where="loss", estimator="k2"))
    assert isinstance(algorithm.loss, WithKL)
    assert algorithm.parts["loss"] is algorithm.loss
    assert (algorithm.loss.name, algorithm.loss.estimator) == ("ratio", "k2")
    assert algorithm.loss.columns() == ("advantages", "old_logprobs", "ref_logprobs")
    assert set(algorithm.loss.reduce()) == {"policy", "kl"}
    assert not isinstance(build(kl=KLConfig(coef=0.0)).loss, WithKL), "coef 0: nothing is added"


@pytest.mark.parametrize(
    ("reduction", "kl"),
    [
        (Reduce("seq_sum_constant", over="m", roles=(0,), coef=3.0, constant=7.0),
         Reduce("seq_sum_constant", over="m", roles=(0,), constant=7.0)),
        (Reduce("seq_mean_token_mean", over="m"), Reduce("seq_mean_token_mean", over="m")),
        (Reduce("token_mean", unit_mask="some"), Reduce("token_mean", unit_mask="some")),
        (Reduce("unit_mean", over="m", roles=(1,)), Reduce("token_mean", over="m", roles=(1,))),
        (Reduce("seq_mean", over="m", coef=2.0), Reduce("token_mean", over="m")),
    ],
)  # fmt: skip
def test_kl_beside_a_loss_is_averaged_as_its_first_term_or_over_tokens(reduction, kl):
    class Other(Ratio):
        held = None

        def outputs(self):
            return ("entropy",)

        def reduce(self):
            return {"first": reduction, "second": Reduce("seq_mean")}

        def load_state_dict(self, state):
            self.held = state

        def summary(self, means):
            return {"double": 2 * means["entropy"]}

    inner = Other()
    loss = WithKL(inner, "k1")
    assert loss.reduce() == {"first": reduction, "second": Reduce("seq_mean"), "kl": kl}
    assert loss.outputs() == ("entropy", "logprobs")
    assert WithKL(Ratio(), "k1").outputs() == Ratio().outputs(), "log-probs are computed once"
    loss.load_state_dict({"x": 1})
    assert inner.held == {"x": 1}
    assert loss.summary({"entropy": 1.5}) == {"double": 3.0}


def test_the_reference_is_updated_after_the_policy():
    """Log-probs of the reference are annotated before a step's updates: a snapshot in front would come too late."""
    kl = KLConfig(coef=0.1, snapshot_every=2, snapshot_share=0.6)
    kinds = [[type(u) for u in build(kl=kl).updates(step)] for step in range(4)]
    assert kinds == [[Update], [Update, Snapshot], [Update], [Update, Snapshot]]
    assert build(kl=kl).updates(1)[1] == Snapshot("reference", "policy", 0.6)
    assert [type(u) for u in build(Critic, critic_warmup=9, kl=kl).updates(1)] == [Update, Snapshot]


def test_truncated_samples_stay_in_the_baseline_and_are_not_trained_on():
    """All samples are credited. The batch is then the untruncated part of the unmasked one, bit for bit."""
    plain, masked = build(), build(mask_truncated=True, minibatches=12)
    groups = fabricate.groups(0)
    full, metrics = plain.credit(plain.assemble(groups)[0])
    cut_U = full.unit["truncated"]
    assert 0 < int(cut_U.sum()) < full.units == 12
    left, masked_metrics = masked.credit(masked.assemble(groups)[0])
    assert masked_metrics == metrics
    expected = full.select((~cut_U).nonzero()[:, 0].tolist())
    assert left.unit["sample"].tolist() == expected.unit["sample"].tolist()
    assert torch.equal(left.tok["advantages"], expected.tok["advantages"])
    assert masked.updates(0, left)[0].minibatches == left.units, "one for each sample that is left"
    assert masked.updates(0)[0].minibatches == 12


def test_a_batch_of_truncated_samples_updates_nothing():
    algorithm = build(Critic, mask_truncated=True, kl=KLConfig(coef=0.1, where="loss", snapshot_every=1))
    groups = fabricate.groups(0)
    for trajectory in (t for g in groups for t in g.trajectories):
        trajectory.status = "truncated" if trajectory.status == "ok" else trajectory.status
    batch, _ = algorithm.assemble(groups)
    batch = batch.with_column("tok", "old_values", torch.zeros(batch.tokens))
    credited, _ = algorithm.credit(batch)
    assert algorithm.updates(0, credited) == [Snapshot("reference", "policy")]
    assert [u.role for u in algorithm.updates(0)[:2]] == ["critic", "policy"]


def test_unbiased_kl_has_the_gradient_of_the_kl_under_samples_of_an_earlier_policy():
    """Expected under the old policy: rho k3 has exactly the gradient of KL(pi, ref), k3 by itself does not."""
    draw = [torch.randn(20, generator=torch.Generator().manual_seed(s)).double() for s in range(3)]
    logits = draw[0].requires_grad_()
    lp, old, ref = (torch.log_softmax(z, 0) for z in draw)
    (exact,) = torch.autograd.grad((lp.exp() * (lp - ref)).sum(), logits, retain_graph=True)
    for unbiased in (True, False):
        loss = WithKL(Ratio(), "k3", unbiased)
        assert ("old_logprobs" in WithKL(NoRatio(), "k3", unbiased).columns()) is unbiased
        x = Columns({"logprobs": lp, "old_logprobs": old, "ref_logprobs": ref, "advantages": torch.zeros(20)})
        (gradient,) = torch.autograd.grad((old.exp() * loss(x).terms["kl"]).sum(), logits, retain_graph=True)
        assert torch.allclose(gradient, 0.5 * exact, atol=1e-6) is unbiased
    assert build(kl=KLConfig(coef=0.1, where="loss", unbiased=True)).loss.unbiased


def test_the_critic_learns_in_units_of_the_returns():
    """Rewards of 100 and 300: the critic's values are scaled by the statistics of all returns so far."""
    algorithm, plain = build(Critic, normalise_values=True), build(Critic)
    history = torch.zeros(0).double()
    for step in range(2):
        groups = fabricate.groups(step, multi_turn=False)
        for g in groups:
            for n, t in enumerate(g.trajectories):
                t.reward = t.score = 100.0 + 200.0 * (n % 2)
        batch = algorithm.assemble(groups)[0]
        said_N = fabricate.values("values", batch.tokens, step)
        mean, std = (float(history.mean()), float(history.std(correction=0))) if step else (0.0, 1.0)
        result, metrics = algorithm.credit(batch.with_column("tok", "old_values", said_N))
        expected, expected_metrics = plain.credit(batch.with_column("tok", "old_values", mean + std * said_N))
        mask_N = batch.tok["loss_mask"]
        assert torch.allclose(result.tok["advantages"], expected.tok["advantages"], rtol=1e-5)
        assert metrics["value/explained_variance"] == pytest.approx(
            expected_metrics["value/explained_variance"], abs=1e-5
        )
        assert torch.equal(result.tok["old_values"][mask_N], said_N[mask_N])
        history = torch.cat([history, expected.tok["returns"][mask_N].double()])
        targets = (expected.tok["returns"][mask_N].double() - history.mean()) / history.std(correction=0)
        assert torch.allclose(result.tok["returns"][mask_N].double(), targets, rtol=1e-5, atol=1e-6)
        assert metrics["value/scale_std"] == pytest.approx(float(history.std(correction=0)), rel=1e-6)
        assert step == 0 or 50 < metrics["value/scale_std"] < 150
    copy = build(Critic, normalise_values=True)
    copy.load_state_dict(algorithm.state_dict())
    assert (copy.scale.mean, copy.scale.std) == (algorithm.scale.mean, algorithm.scale.std)
    with pytest.raises(ValueError, match="keeps no state"):
        build(Critic).load_state_dict(algorithm.state_dict())


def test_the_scale_does_not_depend_on_how_returns_were_split():
    values = torch.randn(100, generator=torch.Generator().manual_seed(0)) * 7 + 3
    full, parts = ValueScale(), ValueScale()
    full.add(values)
    for part in (values[:0], values[:1], values[1:60], values[60:]):
        parts.add(part)
    assert (parts.mean, parts.std) == (pytest.approx(full.mean), pytest.approx(full.std))
    assert (full.mean, full.std) == (
        pytest.approx(float(values.mean())),
        pytest.approx(float(values.std(correction=0))),
    )
    assert ValueScale().std == 1.0


class Columns(dict):
    coef = {"kl": 0.5}


def run_credit(algorithm, kl=0.5):
    batch = algorithm.assemble(fabricate.groups(0))[0]
    lp = fabricate.values("logprobs", batch.tokens, 0)
    batch = batch.with_column("tok", "old_logprobs", lp).with_column("tok", "ref_logprobs", lp - kl)
    return algorithm.credit(batch)


def test_adaptive_kl_in_the_reward_uses_the_actual_number_of_trajectories():
    """12 trajectories, KL 0.5 against a target of 0.25: beta 0.1 * (1 + 0.2 * 12 / 100)."""
    algorithm = build(kl=KLConfig(coef=0.1, target=0.25, horizon=100.0))
    batch, metrics = run_credit(algorithm)
    assert batch.units == 12
    assert metrics["kl/reference"] == pytest.approx(0.5, abs=1e-5)
    assert algorithm.finish(0, batch, metrics) == {"kl/coef": 0.1}
    assert algorithm.kl.beta == pytest.approx(0.1 * (1 + 0.2 * 12 / 100))
    algorithm.finish(1, batch, {})  # a step without a KL
    assert algorithm.kl.beta == pytest.approx(0.1 * (1 + 0.2 * 12 / 100))


def test_adaptive_kl_as_a_loss_reads_the_updates_metric_and_travels():
    algorithm = build(kl=KLConfig(coef=0.1, target=0.25, horizon=100.0, where="loss"))
    batch, _ = run_credit(algorithm)
    algorithm.finish(0, batch, {"policy/kl_reference": 0.225})
    beta = 0.1 * (1 - 0.1 * 12 / 100)
    assert algorithm.updates(1)[0].coef == {"kl": pytest.approx(beta)}
    copy = build(kl=KLConfig(coef=0.1, target=0.25, horizon=100.0, where="loss"))
    copy.load_state_dict(algorithm.state_dict())
    assert copy.kl.beta == algorithm.kl.beta


def test_fixed_kl_keeps_no_state():
    algorithm = build(kl=KLConfig(coef=0.1))
    assert algorithm.state_dict() == {}
    algorithm.load_state_dict({})
    with pytest.raises(ValueError, match="keeps no state"):
        algorithm.load_state_dict({"kl": {"beta": 1.0}})


def test_step_sources_reach_the_batch():
    groups = fabricate.groups(0)
    groups[0].trajectories[0].rewards["fabricated"].steps = ((1, 0, 3.0),)
    assert not build().assemble(groups)[0].tok["step_reward"].any()
    algorithm = build(run=RunOptions(step_sources={"fabricated": 2.0}))
    assert algorithm.assemble(groups)[0].tok["step_reward"].sum() == 6.0


def test_steps_without_a_step_reward_report_0_so_that_no_curve_leaves_them_out():
    groups = fabricate.groups(0)
    plain, subject = build(), build(run=RunOptions(step_sources={"fabricated": 2.0}))
    metrics = subject.credit(subject.assemble(groups)[0])[1]
    assert (metrics["reward/steps"], metrics["reward/total"]) == (0.0, metrics["reward/mean"])
    assert not {"reward/steps", "reward/total"} & {*plain.credit(plain.assemble(groups)[0])[1]}
    groups[0].trajectories[0].rewards["fabricated"].steps = ((1, 0, 3.0),)
    batch = subject.assemble(groups)[0]
    metrics = subject.credit(batch)[1]
    assert metrics["reward/steps"] == pytest.approx(6.0 / batch.units)
    assert metrics["reward/total"] == pytest.approx(metrics["reward/mean"] + 6.0 / batch.units)


def test_the_value_of_a_source_of_step_rewards_is_one_of_the_rewards_that_count_separately():
    """Its step rewards are at their tokens, so they are not in it."""
    results = [(0.0, 5.0, 8.0), (0.0, -5.0, 0.0), (0.0, 0.0, 0.0)]
    row = Row({"prompt": "?"}, "data", 0)
    samples = [
        Trajectory(
            row,
            [Turn([1], False), Turn([2], True, [-0.5])],
            (0, number),
            rewards={"a": RewardResult(a), "b": RewardResult(value, steps=((1, 0, step),))},
            reward=a + value,
        )
        for number, (a, value, step) in enumerate(results)
    ]
    algorithm = build(GDPO, run=RunOptions(step_sources={"b": 1.0}, weights={"a": 1.0}))
    batch, _ = algorithm.credit(algorithm.assemble([Group(row, 0, samples)])[0])
    assert batch.tok["advantages"][batch.tok["loss_mask"]].tolist() == pytest.approx([1.0 + 8.0, -1.0, 0.0])


def test_a_reward_that_the_rollout_gives_is_one_of_the_rewards_that_count_separately():
    """Without an environment. The standardised rewards are -1, 0, 1 of the rollout, twice 0, 1, -1 of a, and 0 of b."""
    row = Row({"prompt": "?"}, "data", 0)
    samples = [
        Trajectory(
            row,
            [Turn([1], False), Turn([2], True, [-0.5], reward=turn_reward)],
            (0, number),
            rewards={"a": RewardResult(a), "b": RewardResult(3.0)},
            reward=turn_reward + 2 * a + 3.0,
        )
        for number, (turn_reward, a) in enumerate([(-10.0, 0.0), (0.0, 0.5), (10.0, -0.5)])
    ]
    algorithm = build(GDPO, run=RunOptions(weights={"a": 2.0, "b": 1.0}))
    batch, _ = algorithm.credit(algorithm.assemble([Group(row, 0, samples)])[0])
    sums = torch.tensor([-1.0, 2.0, -1.0])
    torch.testing.assert_close(batch.tok["advantages"][batch.tok["loss_mask"]], sums / sums.std())


def test_shaping_applies_in_order_and_is_reported():
    shaping = ShapingConfig(overlong_buffer=4, overlong_max=6, overlong_factor=2.0, stop_properly=0.5)
    algorithm = build(shaping=shaping)
    batch = algorithm.assemble(fabricate.groups(0))[0]
    _, metrics = algorithm.credit(batch)
    expected = []
    for r, n, cut in zip(*(batch.unit[k].tolist() for k in ("reward", "own_tokens", "truncated")), strict=True):
        e = min(n - 2, 4)
        r = r - 2.0 * e / 4 if e > 0 else r
        expected.append(r * 0.5 if cut else r)
    assert metrics["reward/shaped"] == pytest.approx(sum(expected) / len(expected))
    assert metrics["reward/mean"] == pytest.approx(batch.unit["reward"].mean().item())


def test_openrlhf_preset_gives_way_to_explicit_fields():
    preset = PolicyGradientConfig(preset="openrlhf")
    assert preset.reward_clip == (-10.0, 10.0)
    assert (preset.kl.coef, preset.kl.chosen, preset.kl.where) == (0.01, "k1", "reward")
    assert PolicyGradientConfig(preset="openrlhf", reward_clip=(-1.0, 1.0)).reward_clip == (-1.0, 1.0)
    assert PolicyGradientConfig().reward_clip is None


@pytest.mark.parametrize(
    ("options", "coef", "where", "estimator"),
    [
        ({"where": "loss"}, 0.01, "loss", "k3"),
        ({"estimator": "k2"}, 0.01, "reward", "k2"),
        ({"target": 0.1}, 0.01, "reward", "k1"),
        ({"coef": 0.0}, 0.0, "reward", "k1"),
    ],
)
def test_setting_one_field_of_kl_keeps_the_presets_other_fields(options, coef, where, estimator):
    kl = PolicyGradientConfig.model_validate({"preset": "openrlhf", "kl": options}).kl
    assert (kl.coef, kl.where, kl.chosen) == (coef, where, estimator)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: KLConfig(coef=0.1, where="loss", estimator="k1"), "zero expected gradient"),
        (lambda: KLConfig(coef=0.1, where="loss", before_baseline=True), "has no effect with where = 'loss'"),
        (lambda: KLConfig(target=0.1), "coef > 0"),
        (lambda: KLConfig(coef=0.1, horizon=5.0), "set target too"),
        (lambda: KLConfig(coef=-0.1), "greater than or equal to 0"),
        (lambda: KLConfig(coef=0.1, unbiased=True), "k3 as a loss, got estimator 'k1' with where = 'reward'"),
        (lambda: KLConfig(coef=0.1, where="loss", estimator="k2", unbiased=True), "got estimator 'k2'"),
        (lambda: KLConfig(snapshot_every=2), "coef = 0 uses no reference"),
        (lambda: KLConfig(coef=0.1, snapshot_share=0.5), "every snapshot_every steps, but snapshot_every is not set"),
        (lambda: PolicyGradientConfig(mask_truncated=True, bootstrap_truncated=True), "remove one of the two"),
        (lambda: KLConfig(coef=0.1, target=0.0), "greater than 0"),
        (lambda: ShapingConfig(overlong_buffer=3), "must be set together"),
        (lambda: ShapingConfig(overlong_factor=0.5), "has no effect without"),
        (lambda: ShapingConfig(overlong_buffer=9, overlong_max=8), "above overlong_max"),
        (lambda: ShapingConfig(stop_properly=1.5), "less than or equal to 1"),
        (lambda: PolicyGradientConfig(reward_clip=(1.0, -1.0)), "low < high"),
        (lambda: PolicyGradientConfig(epochs=0), "greater than or equal to 1"),
    ],
)
def test_what_is_refused(make, message):
    with pytest.raises(ValidationError, match=message):
        make()


def test_k1_as_a_loss_has_no_expected_gradient():
    """The reason for the refusal: in expectation under the policy the gradient of k1 is zero, that of k2 is not."""
    logits = torch.randn(20, generator=torch.Generator().manual_seed(0)).double().requires_grad_()
    ref = torch.log_softmax(torch.randn(20, generator=torch.Generator().manual_seed(1)).double(), 0)
    lp = torch.log_softmax(logits, 0)
    p = lp.exp().detach()
    (k1_grad,) = torch.autograd.grad((p * (lp - ref)).sum(), logits, retain_graph=True)
    (k2_grad,) = torch.autograd.grad((p * (lp - ref) ** 2 / 2).sum(), logits, retain_graph=True)
    (exact,) = torch.autograd.grad((lp.exp() * (lp - ref)).sum(), logits)
    assert k1_grad.abs().max() < 1e-12
    assert torch.allclose(k2_grad, exact)
