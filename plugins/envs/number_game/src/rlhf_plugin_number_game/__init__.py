"""Environment: find a hidden number by asking questions."""

from rlhf import hookimpl

from rlhf_plugin_number_game.game import NumberGame

__all__ = ["NumberGame"]


@hookimpl
def rlhf_register_env() -> list[type]:
    return [NumberGame]
