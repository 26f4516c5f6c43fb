"""REINFORCE++, REINFORCE++-baseline and FlashREINFORCE, which use a statistic of the whole batch and no critic."""

from rlhf import hookimpl
from rlhf.interfaces import Algorithm, Slot
from rlhf_algorithms.policy_gradient import PolicyGradient

_LOSS = Slot("loss", "ppo", {"clip_low": 0.2, "clip_high": 0.2})


class ReinforcePP(PolicyGradient):
    """A_t = discounted return-to-go of R, whitened over all tokens of the batch; works with one sample per prompt.

    Deviations from the paper: (1) KL in the reward is off unless ``kl.coef`` is set.
    """

    name = "reinforce_pp"
    source = "Hu 2025, REINFORCE++, arXiv:2501.03262"
    slots = PolicyGradient.slots | {"advantage": Slot("advantage", "reinforce"), "loss": _LOSS}


class ReinforcePPBaseline(PolicyGradient):
    """r_i - mean of its group, then return-to-go, whitened over all tokens of the batch.

    Deviations from the paper: (1) KL is off unless ``kl.coef`` is set.
    """

    name = "reinforce_pp_baseline"
    source = "Hu 2025, REINFORCE++ (section on the -baseline variant), arXiv:2501.03262"
    slots = PolicyGradient.slots | {"advantage": Slot("advantage", "reinforce_baseline"), "loss": _LOSS}


class FlashReinforce(PolicyGradient):
    """Reward minus the mean of the rollout batch, not whitened; one sample per prompt is enough. Answers that the
    generator sampled with other probabilities are left out: mean binary KL above 5e-3 (``loss.correction``). Every
    answer has the same weight.

    Intended for samples that are some versions old (``stream.staleness``). With one optimizer step the ratio of the
    loss is 1, so its gradient is the REINFORCE gradient, weighted by the correction.
    """

    name = "flash_reinforce"
    source = "FlashREINFORCE 2026; examples/scripts/train_flash_reinforce of OpenRLHF 0.11.2"
    slots = PolicyGradient.slots | {
        "advantage": Slot("advantage", "batch_mean"),
        "loss": Slot(
            "loss",
            "ppo",
            {"aggregation": "seq_mean_token_mean", "correction": {"preset": "flash_reinforce"}},
        ),
    }


@hookimpl
def rlhf_register_algorithm() -> list[type[Algorithm]]:
    return [ReinforcePP, ReinforcePPBaseline, FlashReinforce]
