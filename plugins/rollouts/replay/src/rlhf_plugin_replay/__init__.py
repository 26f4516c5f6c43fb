"""Rollout: replay."""

from rlhf import hookimpl

from rlhf_plugin_replay.replay import Replay

__all__ = ["Replay"]


@hookimpl
def rlhf_register_rollout() -> list[type]:
    return [Replay]
