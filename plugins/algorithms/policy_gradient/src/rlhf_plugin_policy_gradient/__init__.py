"""Advantage estimators and losses that several algorithms name in their config."""

from rlhf import hookimpl

from rlhf_plugin_policy_gradient.advantages import GAE, RLOO, DrGRPO, GroupNorm, Reinforce, ReinforceBaseline
from rlhf_plugin_policy_gradient.losses import CISPO, GSPO, PPO, ReinforceLoss
from rlhf_plugin_policy_gradient.value import Value


@hookimpl
def rlhf_register_advantage():
    return [GAE, Reinforce, ReinforceBaseline, RLOO, GroupNorm, DrGRPO]


@hookimpl
def rlhf_register_loss():
    return [PPO, ReinforceLoss, GSPO, CISPO, Value]
