"""Rollout: verifiers."""

from rlhf import hookimpl

from rlhf_plugin_verifiers.rollout import Verifiers

__all__ = ["Verifiers"]


@hookimpl
def rlhf_register_rollout() -> list[type]:
    return [Verifiers]
