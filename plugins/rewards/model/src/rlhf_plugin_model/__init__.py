"""Reward: a sequence-classification reward model."""

from rlhf import hookimpl

from rlhf_plugin_model.reward import ModelReward

__all__ = ["ModelReward"]


@hookimpl
def rlhf_register_reward() -> list[type]:
    return [ModelReward]
