"""Environment and reward: the tasks of reasoning-gym, which programs generate and score."""

from rlhf import hookimpl

from rlhf_plugin_reasoning_gym.env import ReasoningGym
from rlhf_plugin_reasoning_gym.reward import ReasoningGymReward

__all__ = ["ReasoningGym", "ReasoningGymReward"]


@hookimpl
def rlhf_register_env() -> list[type]:
    return [ReasoningGym]


@hookimpl
def rlhf_register_reward() -> list[type]:
    return [ReasoningGymReward]
