"""Reward models from pairs of answers."""

from rlhf import hookimpl
from rlhf.interfaces import Algorithm, Loss

from rlhf_plugin_reward_model.reward_model import PairwiseLoss, RewardModel

__all__ = ["PairwiseLoss", "RewardModel"]


@hookimpl
def rlhf_register_algorithm() -> list[type[Algorithm]]:
    return [RewardModel]


@hookimpl
def rlhf_register_loss() -> list[type[Loss]]:
    return [PairwiseLoss]
