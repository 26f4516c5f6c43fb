"""Rejection sampling: sample several answers, keep the best, fine-tune on them."""

from __future__ import annotations

import math
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
    """Number of samples per prompt that are trained on: those with the highest rewards. Below
    ``sampling.samples_per_prompt``, or equal to it with ``min_reward``."""
    min_reward: float | None = None
    """Samples with a lower reward are never kept, so a prompt may give fewer than ``keep``, or none. Absent: no limit.
    """
    epochs: int = Field(default=1, ge=1)
    """Passes over each step's kept samples."""
    minibatches: int = Field(default=1, ge=1)
    """Optimizer steps per pass; fewer if a step keeps fewer samples."""


class RejectionSampling(Algorithm[Group]):
    """Keep the best of n samples and maximise the likelihood of their tokens (supervised fine-tuning).

    For each prompt the samples with the highest rewards are kept. Ties go to the lower sample number, so the choice
    does not depend on chance or on the order in which samples arrive. With ``stream.round = R`` the samples of R steps
    are drawn from one policy, and the next round samples from the policy that those steps trained.

    Metrics: ``reward/mean`` of all samples and ``reward/best`` of the kept ones, ``rejection/kept`` (samples),
    ``rejection/empty_groups`` (prompts without a kept sample), ``rejection/ties`` (prompts where a sample was left out
    although its reward equals that of a kept one).

    Deviations from the source: (1) any reward can be used; step rewards are summed. (2) Only samples of the current
    round compete, not those of earlier rounds. (3) The loss is the mean over all kept tokens of the optimizer batch.
    Samples drawn at another temperature are trained on at temperature 1, as demonstrations are.
    """

    name = "rejection_sampling"
    source = "Touvron et al. 2023, Llama 2, arXiv:2307.09288, section 3.2.3"
    Config = RejectionSamplingConfig
    slots = {"loss": Slot("loss", "nll")}

    def needs(self) -> Needs:
        # With as many samples as are kept, nothing would be rejected.
        smallest = self.config.keep + (self.config.min_reward is None)
        # "correction": any text may be a demonstration, so sampling with top_p needs no importance weights.
        return Needs((RoleSpec("policy", trained=True),), smallest, features=("correction",))

    def assemble(self, examples: Sequence[Group]) -> tuple[Batch | None, dict[str, float]]:
        from rlhf.ops.experts import EXPERTS
        from rlhf.ops.trajectories import assemble

        samples = assemble(examples, self.run.step_sources)
        if samples is None:
            return None, {}
        kept_units, metrics = best_of(samples, self.config.keep, self.config.min_reward)
        if not kept_units:
            return None, {}
        # Without the column temperature: the log-probs of a demonstration are those at temperature 1.
        return samples.select_columns(["loss_mask", "group", "sample", EXPERTS]).select(kept_units), metrics

    def updates(self, step: int, batch: Batch | None = None) -> list[Update]:
        """At most one minibatch per kept sample. The number of kept samples is not known before they are scored."""
        minibatches = self.config.minibatches if batch is None else min(self.config.minibatches, batch.units)
        return [Update("policy", "loss", self.config.epochs, minibatches)]


def best_of(samples: Batch, keep: int, min_reward: float | None = None) -> tuple[list[int], dict[str, float]]:
    """The units of the ``keep`` best samples of each group, group by group and best first, and the metrics.

    A sample's reward is its outcome reward plus the sum of its step rewards. Ties go to the lower sample number.
    Samples without a sampled token are ignored.

    Args:
        samples: a batch of :func:`rlhf.ops.trajectories.assemble`.
        min_reward: samples below it are not kept.
    """
    import torch

    steps_U = torch.zeros(samples.units, dtype=torch.float64)
    steps_U.index_add_(0, samples.unit_N, samples.tok["step_reward"].double())
    reward_U: list[float] = (samples.unit["reward"] + steps_U).tolist()
    tokens_U, number_U = samples.unit["own_tokens"].tolist(), samples.unit["sample"].tolist()
    groups: dict[int, list[int]] = {}
    for u, group in enumerate(samples.unit["group"].tolist()):
        groups.setdefault(group, []).append(u)
    kept_units: list[int] = []
    empty_groups = ties = 0
    for members in groups.values():
        passing = [u for u in members if tokens_U[u] and (min_reward is None or reward_U[u] >= min_reward)]
        ranked = sorted(passing, key=lambda u: (-reward_U[u], number_U[u]))
        kept_units += ranked[:keep]
        empty_groups += not ranked
        ties += len(ranked) > keep and reward_U[ranked[keep]] == reward_U[ranked[keep - 1]]
    return kept_units, {
        "reward/mean": _mean([r for r, tokens in zip(reward_U, tokens_U, strict=True) if tokens]),
        "reward/best": _mean([reward_U[u] for u in kept_units]),
        "rejection/kept": float(len(kept_units)),
        "rejection/empty_groups": float(empty_groups),
        "rejection/ties": float(ties),
    }


def _mean(values: list[float]) -> float:
    return math.fsum(values) / len(values) if values else 0.0


@hookimpl
def rlhf_register_algorithm() -> list[type[Algorithm]]:
    return [RejectionSampling]
