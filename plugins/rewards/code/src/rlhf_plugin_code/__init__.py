"""Reward: runs the program in an answer against tests, in a sandbox."""

from rlhf import hookimpl


@hookimpl
def rlhf_register_reward() -> list[type]:
    from rlhf_plugin_code.reward import CodeReward

    return [CodeReward]


@hookimpl
def rlhf_register_check() -> list[type]:
    from rlhf_plugin_code.checks import CodeCheck

    return [CodeCheck]
