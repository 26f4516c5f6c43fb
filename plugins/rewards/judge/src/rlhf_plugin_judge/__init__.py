"""Reward: the judgement of a language model behind an OpenAI-compatible server."""

from rlhf import hookimpl

from rlhf_plugin_judge.reward import JudgeReward

__all__ = ["JudgeReward"]


@hookimpl
def rlhf_register_reward() -> list[type]:
    return [JudgeReward]
