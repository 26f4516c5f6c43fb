"""Advantage estimators and losses that several algorithms name in their config."""

from rlhf import hookimpl
from rlhf.interfaces import Advantage, Loss

from rlhf_plugin_policy_gradient.advantages import GAE, RLOO, DrGRPO, GroupNorm, Reinforce, ReinforceBaseline
from rlhf_plugin_policy_gradient.losses import CISPO, GSPO, PPO, SAPO, ReinforceLoss
from rlhf_plugin_policy_gradient.value import Value


@hookimpl
def rlhf_register_advantage() -> list[type[Advantage]]:
    return [GAE, Reinforce, ReinforceBaseline, RLOO, GroupNorm, DrGRPO]


@hookimpl
def rlhf_register_loss() -> list[type[Loss]]:
    return [PPO, ReinforceLoss, GSPO, CISPO, SAPO, Value]
