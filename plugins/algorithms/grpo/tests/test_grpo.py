"""GRPO, DAPO, Dr. GRPO and LUFFY."""

from __future__ import annotations

import pytest
import torch
from rlhf.errors import TrainingError
from rlhf.types import OnlineShape, Update
from rlhf_algorithms.advantages import RAE, ReMax
from rlhf_algorithms.policy_gradient_config import KLConfig, ShapingConfig
from rlhf_plugin_grpo import DAPO, GRPO, DrGRPO
from rlhf_plugin_grpo.luffy import Luffy, LuffyLoss
from rlhf_testing import fabricate
from rlhf_testing.algorithm import AlgorithmContract
from rlhf_testing.loss import LossContract


class TestGRPO(AlgorithmContract):
    algorithm = GRPO
    configs = (
        GRPO.Config(),
        GRPO.Config(kl=KLConfig(coef=0.04, where="loss"), minibatches=2),
        GRPO.Config(kl=KLConfig(coef=0.04, where="loss", unbiased=True, snapshot_every=1), mask_truncated=True),
        GRPO.Config(echo_coef=0.1),
        GRPO.Config(echo_coef=0.1, kl=KLConfig(coef=0.04, where="loss"), minibatches=2, mask_truncated=True),
    )


class TestDAPO(AlgorithmContract):
    algorithm = DAPO
    configs = (DAPO.Config(), DAPO.Config(shaping=ShapingConfig(overlong_max=6, overlong_buffer=3)))


class TestDrGRPO(AlgorithmContract):
    algorithm = DrGRPO


class TestGRPOWithAGreedyAnswer(AlgorithmContract):
    algorithm = GRPO
    parts = {"advantage": ReMax}


class TestGRPOWithARunningMean(AlgorithmContract):
    algorithm = GRPO
    parts = {"advantage": lambda: RAE(RAE.Config(by=("answer",)))}


class TestLuffy(AlgorithmContract):
    algorithm = Luffy
    configs = (
        Luffy.Config(),
        Luffy.Config(demonstrations_per_group=2, minibatches=2),
        Luffy.Config(kl=KLConfig(coef=0.04, where="loss")),
    )


class TestLuffyLoss(LossContract):
    loss = LuffyLoss
    configs = (LuffyLoss.Config(), LuffyLoss.Config(gamma=0.5, clip_low=0.1), LuffyLoss.Config(clip_high=0.5))

    def statement(self, x_BT):
        c, total = x_BT.config, 0.0
        for b, t in x_BT.mask_BT.nonzero().tolist():
            logprob, advantage = x_BT["logprobs"][b, t], x_BT["advantages"][b, t]
            ratio = torch.exp(logprob - x_BT["old_logprobs"][b, t])
            gain = torch.minimum(ratio * advantage, ratio.clamp(1 - c.clip_low, 1 + c.clip_high) * advantage)
            if x_BT["is_demonstration"][x_BT.unit_B[b]]:
                gain = advantage * logprob.exp() / (logprob.exp() + c.gamma)
            total = total - gain
        return total / x_BT.mask_BT.sum()


def test_one_optimizer_step_needs_no_second_forward():
    algorithm = TestGRPO().build(GRPO.Config())
    assert algorithm.annotations(0) == []
    assert algorithm.updates(0) == [Update("policy", "loss", live={"old_logprobs": "logprobs"})]
    assert [r.name for r in algorithm.needs().roles] == ["policy"]


def test_dapo_is_grpo_with_a_wider_clip_above():
    dapo, grpo = TestDAPO().build(DAPO.Config()), TestGRPO().build(GRPO.Config())
    assert {n: part.name for n, part in dapo.parts.items()} == {n: part.name for n, part in grpo.parts.items()}
    assert dapo.advantage.config == grpo.advantage.config
    assert dapo.loss.config == grpo.loss.config.model_copy(update={"clip_high": 0.28})
    assert dapo.loss.reduce()["policy"].method == "token_mean"


def test_dr_grpo_has_the_constant_denominator():
    """Dr. GRPO kept the token mean."""
    reduce = TestDrGRPO().build(DrGRPO.Config()).loss.reduce()["policy"]
    assert (reduce.method, reduce.constant) == ("seq_sum_constant", 256.0)
    step = TestDrGRPO().step(DrGRPO.Config())
    weights = step.batch.tok["loss_mask"]
    assert weights.any()


def test_dr_grpo_refuses_answers_beyond_the_constant():
    algorithm = TestDrGRPO().build(DrGRPO.Config())
    groups = fabricate.groups(0, multi_turn=False)
    turn = groups[0].trajectories[0].turns[-1]
    turn.ids, turn.logprobs = [1] * 300, [-1.0] * 300
    with pytest.raises(TrainingError, match="300 own tokens"):
        algorithm.loss.prepare(algorithm.assemble(groups)[0])


@pytest.mark.parametrize("kl", [KLConfig(), KLConfig(coef=0.1, where="loss")])
def test_dr_grpo_says_before_the_run_that_answers_can_exceed_the_constant(kl):
    algorithm = TestDrGRPO().build(DrGRPO.Config(kl=kl))
    assert algorithm.conflicts(OnlineShape(8, 256, 2047)) == []
    (message,) = algorithm.conflicts(OnlineShape(8, 512, 2047))
    assert "max_length = 256, but an answer can have 512 own tokens" in message
    assert "Set --algorithm.loss.max_length 512" in message
