"""RLOO: the baseline of each sample is the mean reward of the other samples."""

from rlhf import hookimpl
from rlhf.interfaces import Algorithm, Slot
from rlhf_algorithms.policy_gradient import PolicyGradient


class RLOO(PolicyGradient):
    """A_i = r_i - (sum of the others' rewards) / (G - 1); needs at least two samples per prompt.

    Deviations from the paper: (1) a clipped surrogate, which equals the paper's plain policy gradient with one
    optimizer step per batch (``[algorithm.loss] use = "reinforce"`` is the paper's loss with any number of steps). (2)
    Mean over tokens instead of sums per answer. (3) KL is off unless ``kl.coef`` is set, and is added after the
    baseline; ``kl.before_baseline = true`` is the paper's form.
    """

    name = "rloo"
    source = "Ahmadian et al. 2024, Back to basics, arXiv:2402.14740"
    slots = PolicyGradient.slots | {
        "advantage": Slot("advantage", "rloo"),
        "loss": Slot("loss", "ppo", {"clip_low": 0.2, "clip_high": 0.2}),
    }


@hookimpl
def rlhf_register_algorithm() -> list[type[Algorithm]]:
    return [RLOO]
