"""Rollouts: single_turn and multi_turn."""

from rlhf import hookimpl

from rlhf_plugin_turns.turns import MultiTurn, SingleTurn

__all__ = ["MultiTurn", "SingleTurn"]


@hookimpl
def rlhf_register_rollout() -> list[type]:
    return [SingleTurn, MultiTurn]
