"""Rollout: agent."""

from rlhf import hookimpl

from rlhf_plugin_agent.rollout import Agent

__all__ = ["Agent"]


@hookimpl
def rlhf_register_rollout() -> list[type]:
    return [Agent]
