"""Rollouts: single_turn and multi_turn."""

from rlhf import hookimpl

from rlhf_plugin_turns.multi_turn import MultiTurn
from rlhf_plugin_turns.single_turn import SingleTurn

__all__ = ["MultiTurn", "SingleTurn"]


@hookimpl
def rlhf_register_rollout() -> list[type]:
    return [SingleTurn, MultiTurn]
