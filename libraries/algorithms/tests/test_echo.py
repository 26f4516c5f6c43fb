"""Cross entropy on observations beside the loss of the policy."""

from __future__ import annotations

import math

import pytest
import torch
from pydantic import ValidationError
from rlhf.errors import ConfigError, PluginInvalid
from rlhf.interfaces import Slot
from rlhf.ops.batch import Batch
from rlhf.ops.loss_value import evaluate, finish_sums
from rlhf.ops.packing import SequenceData, UnitData, pack
from rlhf.ops.reduce import weigh
from rlhf.types import OnlineShape
from rlhf_algorithms.advantages import GroupNorm
from rlhf_algorithms.echo import WithEcho
from rlhf_algorithms.kl import WithKL
from rlhf_algorithms.policy_gradient import PolicyGradient
from rlhf_algorithms.policy_gradient_config import PolicyGradientConfig
from rlhf_algorithms.policy_losses import PPOLoss
from rlhf_testing import fabricate
from rlhf_testing.algorithm_step import model_step
from rlhf_testing.loss import LossContract

LAMBDA = 0.1


class Mine(PolicyGradient):
    """For tests."""

    name = "mine"
    slots = PolicyGradient.slots | {"advantage": Slot("advantage", "group_norm"), "loss": Slot("loss", "ppo")}


def build(**options: object) -> Mine:
    return Mine(PolicyGradientConfig(**options), {"advantage": GroupNorm(), "loss": PPOLoss()})


class TestEchoBeside(LossContract):
    """Its statement, splits, masks and signal. Its own log-probs are computed from logits."""

    loss = PPOLoss
    configs = (PPOLoss.Config(), PPOLoss.Config(entropy_coef=0.1, aggregation="seq_mean_token_sum"))
    coef = {"kl": 0.3}

    def build(self, config):
        return WithEcho(WithKL(PPOLoss(config), "k3"), LAMBDA)

    def statement(self, x):
        rho, mask_BT, seen_BT = (x["logprobs"] - x["old_logprobs"]).exp(), x.mask_BT, x["observation_mask"]
        d = x["logprobs"] - x["ref_logprobs"]
        values = -torch.minimum(rho * x["advantages"], rho.clamp(0.8, 1.2) * x["advantages"])
        values = values + 0.3 * ((-d).exp() - 1 + d)
        if x.config.entropy_coef:
            values = values - x.config.entropy_coef * x["entropy"]
        by_token = x.config.aggregation == "token_mean"
        total = (values * mask_BT).sum() / (mask_BT.sum() if by_token else int(mask_BT.any(1).sum()))
        rows = [b for b in range(len(seen_BT)) if seen_BT[b].any()]
        for b in rows:
            nll_T = -torch.log_softmax(x.read_by("observation_logprobs")[b], -1)[
                torch.arange(len(seen_BT[b])), x.ids_BT[b]
            ]
            total = total + LAMBDA / len(rows) * nll_T[seen_BT[b]].mean()
        return total


class TestEchoAlone(TestEchoBeside):
    """Without a KL units without a signal are left out: none that has an observation."""

    configs = (PPOLoss.Config(),)
    coef = {}

    def build(self, config):
        return WithEcho(PPOLoss(config), LAMBDA)

    def statement(self, x):
        rho, seen_BT = (x["logprobs"] - x["old_logprobs"]).exp(), x["observation_mask"]
        values = -torch.minimum(rho * x["advantages"], rho.clamp(0.8, 1.2) * x["advantages"])
        total = (values * x.mask_BT).sum() / x.mask_BT.sum()
        nll = -torch.log_softmax(x.read_by("observation_logprobs"), -1).gather(2, x.ids_BT[..., None])[..., 0]
        live = seen_BT.any(1)
        return total + LAMBDA * ((nll * seen_BT).sum(1)[live] / seen_BT.sum(1)[live]).mean()


def two_samples() -> Batch:
    """Three observation tokens of one sample, one of the other; two and one tokens of the policy."""
    rows = (([0, 1, 0, 0, 0, 1], [0, 0, 1, 1, 1, 0]), ([0, 1, 0], [0, 0, 1]), ([0, 1], [0, 0]))
    units = []
    for loss_mask, observation_mask in rows:
        tok = {"loss_mask": [bool(v) for v in loss_mask], "observation_mask": [bool(v) for v in observation_mask]}
        units.append(UnitData([SequenceData([1] * len(loss_mask), {**tok, "advantages": [1.0] * len(loss_mask)})]))
    return pack(units)


def test_a_loss_by_hand() -> None:
    """The ratio is 1 and A = 1: the policy's term is -1. Observations: probabilities 1/2, 1/4, 1/8 (mean 2 ln 2) in one
    sample, 1/16 (4 ln 2) in the other: 0.1 * 3 ln 2. The mean over the four tokens is (1 + 2 + 3 + 4) / 4 ln 2."""
    loss = WithEcho(PPOLoss(), LAMBDA)
    batch = weigh(two_samples(), loss.reduce())
    logprobs_A = torch.full((4,), -1.0, requires_grad=True)
    seen_A = (-math.log(2) * torch.tensor([1.0, 2, 3, 4])).requires_grad_()
    outputs = {"logprobs": logprobs_A, "observation_logprobs": seen_A}
    total, sums = evaluate(loss, batch, outputs, {}, {"old_logprobs": "logprobs"})
    total.backward()
    assert total.item() == pytest.approx(-1 + 0.3 * math.log(2))
    assert seen_A.grad.tolist() == pytest.approx([-0.1 / 6, -0.1 / 6, -0.1 / 6, -0.1 / 2])
    assert logprobs_A.grad.tolist() == pytest.approx([-0.25] * 4)
    assert finish_sums(sums)["observation_nll"] == pytest.approx(2.5 * math.log(2))


def test_the_step_is_that_of_the_policy_plus_the_coefficient_times_an_independent_cross_entropy() -> None:
    """Through a model, in fp64 without masks, weights and heads; the other samples have no observation."""
    data = fabricate.groups(0)
    plain, step = (model_step(build(**options), data, 0) for options in ({}, {"echo_coef": LAMBDA}))
    trainer = fabricated_policy()
    module, losses = trainer.module.double(), []
    for trajectory in (t for g in data for t in g.trajectories):
        turns = trajectory.turns
        if len(turns) == 1 or not any(not t.sampled and not t.fresh for t in turns[1:]):
            continue
        first = turns[: next(i for i, t in enumerate(turns) if t.fresh)]
        ids, mask, sampled = [], [], False
        for turn in first:
            mask += [sampled and not turn.sampled] * len(turn.ids)
            ids += list(turn.ids)
            sampled = sampled or turn.sampled
        logp = torch.log_softmax(module(torch.tensor(ids)), -1)
        losses.append(-torch.stack([logp[t - 1, ids[t]] for t in range(len(ids)) if mask[t]]).mean())
    assert len(losses) == len(data), "one sample of each group has observations"
    cross_entropy = torch.stack(losses).mean()
    cross_entropy.backward()
    assert step.metrics["policy/loss/echo"] == pytest.approx(LAMBDA * cross_entropy.item(), rel=1e-6)
    run, reference = step.runs["policy/loss"], plain.runs["policy/loss"]
    for name, parameter in module.named_parameters():
        expected = reference.gradients[name].double() + LAMBDA * parameter.grad
        torch.testing.assert_close(run.gradients[name].double(), expected, rtol=1e-4, atol=1e-7)
    for name, value in plain.metrics.items():
        if name != "policy/loss" and name != "policy/tokens_left_out":
            assert step.metrics[name] == pytest.approx(value, rel=1e-6, abs=1e-9), name


def fabricated_policy():
    from rlhf.interfaces.model import ModelSpec
    from rlhf_testing.plain import EmbeddingTrainer

    return EmbeddingTrainer(None, ModelSpec(build().needs().roles[0], "", seed=1))


def test_samples_without_an_observation_report_no_likelihood() -> None:
    step = model_step(build(echo_coef=LAMBDA), fabricate.groups(0, multi_turn=False), 0)
    assert step.metrics["policy/loss/echo"] == 0
    assert "policy/observation_nll" not in step.metrics


def test_a_run_without_observations_is_refused() -> None:
    shape = OnlineShape(8, 9, 99, observations=False)
    [problem] = build(echo_coef=LAMBDA).conflicts(shape)
    assert "algorithm.echo_coef = 0.1" in problem
    assert "--env.use" in problem
    assert build().conflicts(shape) == build(echo_coef=LAMBDA).conflicts(OnlineShape(8, 9, 99)) == []


@pytest.mark.parametrize("coef", [0, -0.1])
def test_a_coefficient_that_is_not_above_0_is_refused(coef: float) -> None:
    with pytest.raises(ValidationError, match="echo_coef"):
        PolicyGradientConfig(echo_coef=coef)


def test_a_subclass_that_lays_out_its_batch_itself_must_apply_it() -> None:
    class Own(Mine):
        def assemble(self, examples):
            return None, {}

    with pytest.raises((ConfigError, PluginInvalid), match=r"echo_coef would have no effect: Own.assemble"):
        Own(PolicyGradientConfig(echo_coef=LAMBDA), {"advantage": GroupNorm(), "loss": PPOLoss()})
