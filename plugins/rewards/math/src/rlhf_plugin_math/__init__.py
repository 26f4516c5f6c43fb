"""Reward: verifies mathematical answers."""

from rlhf import hookimpl

from rlhf_plugin_math.reward import MathReward

__all__ = ["MathReward"]


@hookimpl
def rlhf_register_reward() -> list[type]:
    return [MathReward]
