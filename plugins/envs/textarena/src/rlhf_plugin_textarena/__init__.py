"""Environment: the games of TextArena, alone or against an opponent from a file."""

from rlhf import hookimpl

from rlhf_plugin_textarena.env import TextArena

__all__ = ["TextArena"]


@hookimpl
def rlhf_register_env() -> list[type]:
    return [TextArena]
