"""The conformance suite of rewards."""

from rlhf_plugin_format import FormatReward
from rlhf_testing.reward import RewardContract


class TestFormat(RewardContract):
    reward = FormatReward
    configs = (
        FormatReward.Config(pattern=r"\d+"),
        FormatReward.Config(pattern=r"answer", mode="search", on="completion", no_match=-1.0),
        FormatReward.Config(template="<think>{}</think>{}"),
    )
    cases = (({}, "42", 1.0), ({}, "forty-two", 0.0), ({}, "", 0.0))
