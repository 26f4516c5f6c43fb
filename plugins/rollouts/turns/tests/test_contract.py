"""The conformance suite of rollouts."""

from rlhf.testing.rollout import RolloutContract
from rlhf_plugin_turns import MultiTurn, SingleTurn


class TestSingleTurn(RolloutContract):
    rollout = SingleTurn


class TestMultiTurn(RolloutContract):
    rollout = MultiTurn
