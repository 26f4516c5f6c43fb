"""Environment: episodes on an OpenEnv server, over its web socket."""

from rlhf import hookimpl

from rlhf_plugin_openenv.env import OpenEnv

__all__ = ["OpenEnv"]


@hookimpl
def rlhf_register_env() -> list[type]:
    return [OpenEnv]
