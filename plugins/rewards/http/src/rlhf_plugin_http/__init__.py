"""Rewards from servers: scores, by the protocol of OpenRLHF's remote reward models, and log-probs of a teacher."""

from rlhf import hookimpl

from rlhf_plugin_http.reward import HttpReward
from rlhf_plugin_http.teacher_logprobs import TeacherReward

__all__ = ["HttpReward", "TeacherReward"]


@hookimpl
def rlhf_register_reward() -> list[type]:
    return [HttpReward, TeacherReward]
