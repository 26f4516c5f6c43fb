"""Rollout: replay."""

from rlhf import hookimpl

from rlhf_plugin_replay.replay import ReplayRollout

__all__ = ["ReplayRollout"]


@hookimpl
def rlhf_register_rollout() -> list[type]:
    return [ReplayRollout]
