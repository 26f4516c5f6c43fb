"""Reward: a penalty for answers that are too short or too long."""

from rlhf import hookimpl

from rlhf_plugin_length.reward import LengthReward

__all__ = ["LengthReward"]


@hookimpl
def rlhf_register_reward() -> list[type]:
    return [LengthReward]
