"""Base classes of algorithms, and the advantage estimators and policy losses that several algorithms share.

Only the hooks import the estimators and losses, because they need torch and most users of a base class do not.
"""

from rlhf import hookimpl
from rlhf.interfaces import Advantage, Loss


@hookimpl
def rlhf_register_advantage() -> list[type[Advantage]]:
    from rlhf_algorithms import advantages as a

    of_groups = [a.LeaveOneOut, a.GroupNorm, a.GroupMean, a.GDPO, a.MaxRL, a.OPO, a.PassAtK, a.GiGPO]
    return [a.GAE, a.Reinforce, a.ReinforceBaseline, a.BatchMean, *of_groups, a.ReMax, a.RAE]


@hookimpl
def rlhf_register_loss() -> list[type[Loss]]:
    from rlhf_algorithms.critic import Value
    from rlhf_algorithms.policy_losses import CISPO, GSPO, SAPO, PPOLoss, ReinforceLoss
    from rlhf_algorithms.trust_regions import DPPO, GMPO, VESPO, Covariance

    return [PPOLoss, ReinforceLoss, GSPO, CISPO, SAPO, DPPO, VESPO, GMPO, Covariance, Value]
