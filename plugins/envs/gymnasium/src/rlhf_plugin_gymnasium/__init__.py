"""Environment: environments of gymnasium with discrete actions, as text."""

from rlhf import hookimpl

from rlhf_plugin_gymnasium.env import GymnasiumEnv

__all__ = ["GymnasiumEnv"]


@hookimpl
def rlhf_register_env() -> list[type]:
    return [GymnasiumEnv]
