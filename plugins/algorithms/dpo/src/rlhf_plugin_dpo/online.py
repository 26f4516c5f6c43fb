"""Direct preference optimisation on pairs of the policy's own samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from pydantic import Field
from rlhf.ops.trajectories import assemble
from rlhf.types import Needs, Update
from rlhf_algorithms.snapshots import SnapshotConfig

from rlhf_plugin_dpo.pairing import PairChoice, as_pairs, pair_samples
from rlhf_plugin_dpo.pairwise import Pairwise

if TYPE_CHECKING:
    from rlhf.ops.batch import Batch
    from rlhf.types import Group


class OnlineDPOConfig(SnapshotConfig):
    pairs: PairChoice = "best_worst"
    """Pairs of each prompt's samples: the best and the worst, or ``all`` pairs with different scores (prompts with more
    pairs have more weight)."""
    min_gap: float = Field(default=0.0, ge=0)
    """Smallest difference of scores: two samples are a pair only if their scores differ by more. 0 excludes only
    ties."""
    epochs: int = Field(default=1, ge=1)
    """Passes over each step's pairs."""
    minibatches: int = Field(default=1, ge=1)
    """Optimizer steps per pass; fewer if a step has fewer pairs."""


class OnlineDPO(Pairwise):
    """Sample, score, pair, train. With ``snapshot_every`` it is iterative DPO: rounds with a reference each.

    The best of a prompt's samples is chosen and its worst rejected, the first of several equals; equal scores and equal
    answers give no pair. Metrics: ``pairs/made``, ``pairs/groups``, ``pairs/tied_groups`` (no two scores differ),
    ``pairs/equal_answers``, ``pairs/chosen_score``, ``pairs/rejected_score``.

    Deviations: (1) log-probs are of the sampling distribution (``sampling.temperature``), for policy and reference, as
    in TRL's online DPO. (2) OpenRLHF's iterative DPO keeps one reference for all rounds (leave out
    ``snapshot_every``) and pairs equal samples too.
    """

    name = "online_dpo"
    source = "Guo et al. 2024, Direct language model alignment from online AI feedback, arXiv:2402.04792"
    Config = OnlineDPOConfig

    def needs(self) -> Needs:
        # "correction": pairs may come from any distribution, so sampling with top_p needs no importance weights.
        return replace(super().needs(), group_min=2, features=("correction",))

    def assemble(self, examples: Sequence[Group]) -> tuple[Batch | None, dict[str, float]]:  # type: ignore[override]
        samples = assemble(examples, self.run.step_sources)
        if samples is None:
            return None, {}
        pairing = pair_samples(samples, self.config.pairs, self.config.min_gap)
        if not pairing.pairs:
            return None, {}
        batch = as_pairs(samples, pairing.pairs)
        return batch, {
            "pairs/made": float(len(pairing.pairs)),
            "pairs/groups": float(pairing.groups),
            "pairs/tied_groups": float(pairing.tied_groups),
            "pairs/equal_answers": float(pairing.equal_answers),
            "pairs/chosen_score": float(batch.unit["chosen_score"].mean()),
            "pairs/rejected_score": float(batch.unit["rejected_score"].mean()),
        }

    def update(self, batch: Batch | None) -> Update:
        """At most one minibatch per pair. The number of pairs is not known before the samples are scored."""
        minibatches = self.config.minibatches if batch is None else min(self.config.minibatches, batch.units)
        return Update("policy", "loss", self.config.epochs, minibatches, coef=self.coef())
