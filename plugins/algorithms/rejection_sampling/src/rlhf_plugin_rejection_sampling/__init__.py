"""Rejection sampling: sample several answers, keep the best, fine-tune on them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pydantic import Field
from rlhf import hookimpl
from rlhf.interfaces import Algorithm, ComponentConfig, Slot
from rlhf.types import Group, Needs, RoleSpec, Update

if TYPE_CHECKING:
    from rlhf.ops.batch import Batch


class RejectionSamplingConfig(ComponentConfig):
    keep: int = Field(default=1, ge=1)
    """So many best samples of each prompt are trained on."""
    min_reward: float | None = None
    """Samples below it are never kept, so a prompt may give fewer than ``keep``, or none; off where absent."""
    epochs: int = Field(default=1, ge=1)
    """Passes over each step's kept samples."""
    minibatches: int = Field(default=1, ge=1)
    """Optimizer steps per pass; fewer where a step kept fewer samples."""


class RejectionSampling(Algorithm):
    """Best of n, then supervised fine-tuning on it: the likelihood of the tokens that were sampled is maximised.

    Of each prompt the samples with the highest rewards are kept; of equal rewards those with the lower sample number,
    so neither chance nor the order in which samples arrive enters. With ``stream.round = R`` the samples of R steps are
    drawn from one policy, and every round starts from what the last one learnt.

    Metrics: ``reward/mean`` of all samples and ``reward/best`` of the kept ones, ``rejection/kept`` (samples),
    ``rejection/empty_groups`` (prompts that gave none), ``rejection/ties`` (prompts where a sample was left out though
    its reward equals that of a kept one).

    Deviations from the source: (1) rewards are of any kind; steps' rewards are summed. (2) Only samples of the current
    round compete, not those of earlier rounds. (3) The loss is the mean over all kept tokens of the optimizer batch.
    Samples drawn at another temperature than 1 are trained on at temperature 1, as demonstrations are.
    """

    name = "rejection_sampling"
    source = "Touvron et al. 2023, Llama 2, arXiv:2307.09288, section 3.2.3"
    Config = RejectionSamplingConfig
    slots = {"loss": Slot("loss", "nll")}

    def needs(self) -> Needs:
        # "correction": any text may be a demonstration, so sampling with top_p needs no importance weights.
        return Needs((RoleSpec("policy", trained=True),), self.config.keep, features=("correction",))

    def assemble(self, examples: Sequence[Group]) -> tuple[Batch | None, dict[str, float]]:  # type: ignore[override]
        from rlhf.ops.trajectories import assemble

        from rlhf_plugin_rejection_sampling.best import best_of

        samples = assemble(examples, self.step_sources)
        if samples is None:
            return None, {}
        best = best_of(samples, self.config.keep, self.config.min_reward)
        if not best.units:
            return None, {}
        # Without the column temperature: the log-probs of a demonstration are those at temperature 1.
        batch = samples.only(["loss_mask", "group", "sample"]).select(best.units)
        return batch, {
            "reward/mean": best.mean,
            "reward/best": best.mean_kept,
            "rejection/kept": float(len(best.units)),
            "rejection/empty_groups": float(best.empty_groups),
            "rejection/ties": float(best.ties),
        }

    def updates(self, step: int, batch: Batch | None = None) -> list[Update]:  # type: ignore[override]
        """At most one minibatch per kept sample: how many a step keeps is not known before its samples are scored."""
        minibatches = self.config.minibatches if batch is None else min(self.config.minibatches, batch.units)
        return [Update("policy", "loss", self.config.epochs, minibatches)]


@hookimpl
def rlhf_register_algorithm() -> list[type[Algorithm]]:
    return [RejectionSampling]
