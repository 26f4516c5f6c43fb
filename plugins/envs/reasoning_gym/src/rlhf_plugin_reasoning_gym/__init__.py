"""Environment: the tasks of reasoning-gym, each made and scored by a program."""

from rlhf import hookimpl

from rlhf_plugin_reasoning_gym.env import ReasoningGym

__all__ = ["ReasoningGym"]


@hookimpl
def rlhf_register_env() -> list[type]:
    return [ReasoningGym]
