"""PPO: a critic, generalised advantage estimation and the clipped surrogate."""

from rlhf import hookimpl
from rlhf.interfaces import Algorithm, Slot
from rlhf_algorithms.policy_gradient import PolicyGradient


class PPO(PolicyGradient):
    """A_t by GAE from a critic that is trained with the policy, whitened over the batch; clipped surrogate.

    delta_t = R_t + gamma V_{t+1} - V_t;  A_t = delta_t + gamma lambda A_{t+1};
    L = -min(rho A, clip(rho, 1 - low, 1 + high) A), mean over all tokens.

    Deviations from the paper: (1) lambda = 1 by default: with a smaller lambda a reward at the end of a long answer
    decays to nothing. (2) One optimizer step per rollout batch by default (``epochs``, ``minibatches``).
    """

    name = "ppo"
    source = "Schulman et al. 2017, Proximal policy optimization algorithms, arXiv:1707.06347"
    slots = PolicyGradient.slots | {
        "advantage": Slot("advantage", "gae", {"gamma": 1.0, "lam": 1.0}),
        "loss": Slot("loss", "ppo", {"clip_low": 0.2, "clip_high": 0.2}),
        "value_loss": Slot("loss", "value", {"clip": 0.5}),
    }


@hookimpl
def rlhf_register_algorithm() -> list[type[Algorithm]]:
    return [PPO]
