"""The conformance suite of rollouts."""

from rlhf_plugin_turns import MultiTurn, SingleTurn
from rlhf_testing.rollout import RolloutContract


class TestSingleTurn(RolloutContract):
    rollout = SingleTurn


class TestMultiTurn(RolloutContract):
    rollout = MultiTurn
