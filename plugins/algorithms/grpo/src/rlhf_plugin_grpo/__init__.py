"""GRPO, DAPO and Dr. GRPO: policy gradient with a baseline over the group, without a critic."""

from rlhf import hookimpl
from rlhf.interfaces import Algorithm, Loss, Slot
from rlhf_algorithms.policy_gradient import PolicyGradient


class GRPO(PolicyGradient):
    """A_i = (r_i - mean of its group) / (std of its group + 1e-9), the same for every token; clipped surrogate.

    Deviations from the paper: (1) mean over all tokens of the batch instead of a mean per answer first
    (``loss.aggregation = "seq_mean_token_mean"`` is the paper's). (2) KL is off unless ``kl.coef`` is set; the paper's
    is ``kl = { coef = 0.04, where = "loss", estimator = "k3" }``.
    """

    name = "grpo"
    source = "Shao et al. 2024, DeepSeekMath, arXiv:2402.03300"
    slots = PolicyGradient.slots | {
        "advantage": Slot("advantage", "group_norm", {"std": "group"}),
        "loss": Slot("loss", "ppo", {"clip_low": 0.2, "clip_high": 0.2}),
    }


class DAPO(PolicyGradient):
    """GRPO with a higher upper clip (0.2, 0.28), the mean over all tokens of the batch, and no KL.

    The paper's other two parts depend on the run and are set there: dynamic sampling is ``stream.filter`` (low = 0,
    high = 1 for scores of 0 and 1), soft overlong punishment is ``shaping`` (``overlong_max`` =
    ``sampling.max_new_tokens``, ``overlong_buffer`` a fifth of it). ``examples/recipes/dapo.toml`` has both.

    Deviations from the paper: (1) both are off unless they are set.
    """

    name = "dapo"
    source = "Yu et al. 2025, DAPO, arXiv:2503.14476"
    slots = PolicyGradient.slots | {
        "advantage": Slot("advantage", "group_norm", {"std": "group"}),
        "loss": Slot("loss", "ppo", {"clip_low": 0.2, "clip_high": 0.28}),
    }


class DrGRPO(PolicyGradient):
    """A_i = r_i - mean of its group; the sum over tokens divided by answers x ``loss.max_length``.

    Without the division by the standard deviation, nearly solved prompts do not get a larger weight. With a constant
    instead of the answer's length, tokens of short answers do not get a larger weight. ``loss.max_length`` should be
    ``sampling.max_new_tokens`` (times the turns). A smaller value is refused before the run; a larger one only scales
    the loss.

    Deviations from the paper: (1) KL is off unless ``kl.coef`` is set, as the paper recommends.
    """

    name = "dr_grpo"
    source = "Liu et al. 2025, Understanding R1-Zero-like training, arXiv:2503.20783"
    slots = PolicyGradient.slots | {
        "advantage": Slot("advantage", "dr_grpo"),
        "loss": Slot(
            "loss",
            "ppo",
            {"clip_low": 0.2, "clip_high": 0.2, "aggregation": "seq_sum_constant", "max_length": 256},
        ),
    }


@hookimpl
def rlhf_register_algorithm() -> list[type[Algorithm]]:
    from rlhf_plugin_grpo.luffy import Luffy

    return [GRPO, DAPO, DrGRPO, Luffy]


@hookimpl
def rlhf_register_loss() -> list[type[Loss]]:
    from rlhf_plugin_grpo.luffy import LuffyLoss

    return [LuffyLoss]
