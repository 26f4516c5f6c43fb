"""Adapter: OpenRLHF reward_func and AgentInstance files through file:."""

from rlhf import hookimpl

from rlhf_plugin_openrlhf.adapter import OpenRLHF

__all__ = ["OpenRLHF"]


@hookimpl
def rlhf_register_adapter() -> list[type]:
    return [OpenRLHF]
