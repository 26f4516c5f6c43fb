"""Environment: tasks of a resources server of NeMo Gym, over HTTP."""

from rlhf import hookimpl

from rlhf_plugin_nemo_gym.env import NemoGym

__all__ = ["NemoGym"]


@hookimpl
def rlhf_register_env() -> list[type]:
    return [NemoGym]
