"""Curricula: pass_rate, easy_to_hard and adaptive_mixing."""

from rlhf import hookimpl

from rlhf_plugin_curricula.adaptive_mixing import AdaptiveMixing
from rlhf_plugin_curricula.easy_to_hard import EasyToHard
from rlhf_plugin_curricula.pass_rate import PassRate

__all__ = ["AdaptiveMixing", "EasyToHard", "PassRate"]


@hookimpl
def rlhf_register_curriculum() -> list[type]:
    return [PassRate, EasyToHard, AdaptiveMixing]
