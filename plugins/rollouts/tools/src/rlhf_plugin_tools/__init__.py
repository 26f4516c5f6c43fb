"""Rollout: the policy calls tools (Python functions, MCP servers) through its chat template."""

from rlhf import hookimpl


@hookimpl
def rlhf_register_rollout() -> list[type]:
    from rlhf_plugin_tools.rollout import ToolsRollout  # not in worker processes, which start faster without it

    return [ToolsRollout]
