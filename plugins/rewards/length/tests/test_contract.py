"""The conformance suite of rewards."""

from rlhf_plugin_length import LengthReward
from rlhf_testing.reward import RewardContract


class TestLength(RewardContract):
    reward = LengthReward
    configs = (
        LengthReward.Config(low=2, high=4, per_token=0.25),
        LengthReward.Config(high=3),
        LengthReward.Config(low=10, inside=1.0),
    )
    cases = (({}, "abc", 0.0), ({}, "a", -0.25), ({}, "abcdef", -0.5), ({}, "", -0.5), ({}, "a" * 99, -1.0))
