"""PPO: needs and conformance."""

from __future__ import annotations

from rlhf_algorithms.policy_gradient_config import KLConfig
from rlhf_plugin_ppo import PPO
from rlhf_testing.algorithm import AlgorithmContract


class TestPPO(AlgorithmContract):
    algorithm = PPO
    configs = (
        PPO.Config(),
        PPO.Config(kl=KLConfig(coef=0.1, target=0.05), bootstrap_truncated=True),
        PPO.Config(epochs=2, minibatches=2, kl=KLConfig(coef=0.1, where="loss")),
    )


class TestCritic(AlgorithmContract):
    algorithm = PPO
    configs = (PPO.Config(critic_warmup=1), PPO.Config(normalise_values=True, bootstrap_truncated=True))


def test_needs_a_critic_and_a_reference_only_for_kl():
    plain, with_kl = (TestPPO().build(c) for c in (PPO.Config(), PPO.Config(kl=KLConfig(coef=0.1))))
    assert [r.name for r in plain.needs().roles] == ["policy", "critic"]
    assert [r.name for r in with_kl.needs().roles] == ["policy", "reference", "critic"]
