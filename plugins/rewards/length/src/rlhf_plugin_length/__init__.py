"""Reward: answers of a wanted length."""

from rlhf import hookimpl

from rlhf_plugin_length.reward import LengthReward

__all__ = ["LengthReward"]


@hookimpl
def rlhf_register_reward() -> list[type]:
    return [LengthReward]
