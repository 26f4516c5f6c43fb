"""Reward: a regular expression or a template that the answer must match."""

from rlhf import hookimpl

from rlhf_plugin_format.reward import FormatReward

__all__ = ["FormatReward"]


@hookimpl
def rlhf_register_reward() -> list[type]:
    return [FormatReward]
