"""Reward: scores from a server, by the protocol of OpenRLHF's remote reward models."""

from rlhf import hookimpl

from rlhf_plugin_http.reward import HttpReward

__all__ = ["HttpReward"]


@hookimpl
def rlhf_register_reward() -> list[type]:
    return [HttpReward]
