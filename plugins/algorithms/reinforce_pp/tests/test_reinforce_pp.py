"""REINFORCE++ with and without baseline."""

from __future__ import annotations

import pytest
import torch
from rlhf_algorithms.policy_gradient_config import KLConfig
from rlhf_plugin_reinforce_pp import FlashReinforce, ReinforcePP, ReinforcePPBaseline
from rlhf_testing import fabricate
from rlhf_testing.algorithm import AlgorithmContract


class TestReinforcePP(AlgorithmContract):
    algorithm = ReinforcePP
    configs = (ReinforcePP.Config(), ReinforcePP.Config(kl=KLConfig(coef=0.01), epochs=2))


class TestReinforcePPBaseline(AlgorithmContract):
    algorithm = ReinforcePPBaseline
    configs = (ReinforcePPBaseline.Config(), ReinforcePPBaseline.Config(kl=KLConfig(coef=0.1, where="loss")))


class TestFlashReinforce(AlgorithmContract):
    algorithm = FlashReinforce
    configs = (FlashReinforce.Config(), FlashReinforce.Config(epochs=2))


def test_flash_reinforce_subtracts_the_mean_of_the_batch():
    algorithm = TestFlashReinforce().build(FlashReinforce.Config())
    batch, _ = algorithm.credit(algorithm.assemble(fabricate.groups(3))[0])
    rewards_U = batch.unit["reward"]
    credit_U = (rewards_U - rewards_U.mean())[batch.unit_N]
    own_N = batch.tok["loss_mask"]
    assert batch.tok["advantages"][own_N].tolist() == pytest.approx(credit_U[own_N].tolist(), rel=1e-6)
    assert algorithm.needs().group_min == 1
    assert algorithm.needs().features == ("correction",)


@pytest.mark.parametrize("suite", [TestReinforcePP, TestReinforcePPBaseline])
def test_advantages_are_whitened_over_tokens(suite):
    algorithm = suite().build(suite.algorithm.Config())
    batch, _ = algorithm.credit(algorithm.assemble(fabricate.groups(3))[0])
    advantages = batch.tok["advantages"][batch.tok["loss_mask"]].double()
    assert advantages.mean().item() == pytest.approx(0.0, abs=1e-6)
    assert advantages.var(correction=0).item() == pytest.approx(1.0, abs=1e-5)
    assert torch.all(batch.tok["advantages"][~batch.tok["loss_mask"]] == 0)


def test_one_sample_per_prompt_is_enough_only_without_baseline():
    assert TestReinforcePP().build(ReinforcePP.Config()).needs().group_min == 1
    assert TestReinforcePPBaseline().build(ReinforcePPBaseline.Config()).needs().group_min == 2
