"""The algorithms, on pairs of the data and on pairs of the policy's samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from pydantic import Field
from rlhf.errors import ConfigError
from rlhf.interfaces import ComponentConfig, Loss, Slot
from rlhf.ops.batch import Batch
from rlhf.ops.experts import EXPERTS
from rlhf.ops.trajectories import assemble
from rlhf.types import Annotation, Needs, RoleSpec, RunOptions, Snapshot, Update
from rlhf_algorithms.pair_learning import PairLearning
from rlhf_algorithms.snapshots import SnapshotConfig, snapshots_due
from torch import Tensor

if TYPE_CHECKING:
    from rlhf.types import Group


PairChoice = Literal["best_worst", "all"]


@dataclass(frozen=True, slots=True)
class ScoredAnswer:
    """One scored answer of a group."""

    unit: int
    """Its index in the batch of samples."""
    number: int
    """Its number in the group. It breaks ties, so the result does not depend on the order of samples."""
    score: float
    answer: tuple[int, ...]
    """The tokens that were sampled."""


def candidates(group: Sequence[ScoredAnswer], choice: PairChoice) -> list[tuple[ScoredAnswer, ScoredAnswer]]:
    """Pairs of a group, the higher score first. ``best_worst``: the first of the best samples with the first of the
    worst. ``all``: every two samples."""
    ranked = sorted(group, key=lambda s: (-s.score, s.number))
    if choice == "all":
        return [(a, b) for n, a in enumerate(ranked) for b in ranked[n + 1 :]]
    return [(ranked[0], min(group, key=lambda s: (s.score, s.number)))] if group else []


def pair_samples(
    batch: Batch, choice: PairChoice, min_gap: float
) -> tuple[list[tuple[ScoredAnswer, ScoredAnswer]], dict[str, float]]:
    """The pairs (chosen, rejected) of a batch of samples (:func:`rlhf.ops.trajectories.assemble`), groups in the
    batch's order, and counts for the metrics.

    The scores of a pair differ by more than ``min_gap``, and its answers are different tokens. A sample's score is its
    reward plus the sum of its step rewards. Samples without a sampled token are in no pair.
    """
    score_U = scores(batch).tolist()
    mask_N, unit_N = batch.tok["loss_mask"], batch.unit_N
    answers = torch.split(batch.ids_N[mask_N], torch.bincount(unit_N[mask_N], minlength=batch.units).tolist())
    groups: dict[int, list[ScoredAnswer]] = {}
    for unit, (group, number) in enumerate(
        zip(batch.unit["group"].tolist(), batch.unit["sample"].tolist(), strict=True)
    ):
        members = groups.setdefault(group, [])
        if answers[unit].numel():
            members.append(ScoredAnswer(unit, number, score_U[unit], tuple(answers[unit].tolist())))
    ranked_pairs = [
        [(a, b) for a, b in candidates(members, choice) if a.score - b.score > min_gap] for members in groups.values()
    ]
    pairs = [(a, b) for group_pairs in ranked_pairs for a, b in group_pairs if a.answer != b.answer]
    return pairs, {
        "pairs/made": float(len(pairs)),
        "pairs/groups": float(len(groups)),
        "pairs/tied_groups": float(sum(not group_pairs for group_pairs in ranked_pairs)),
        "pairs/equal_answers": float(sum(map(len, ranked_pairs)) - len(pairs)),
    }


def scores(batch: Batch) -> Tensor:
    """float64 [U]: the reward of each sample with its step rewards."""
    step_U = torch.zeros(batch.units, dtype=torch.float64)
    return batch.unit["reward"] + step_U.index_add(0, batch.unit_N, batch.tok["step_reward"].double())


def as_pairs(batch: Batch, pairs: Sequence[tuple[ScoredAnswer, ScoredAnswer]]) -> Batch:
    """A unit for each pair: the sequences of the chosen sample with role 0, and of the rejected sample with role 1.

    Token columns ``loss_mask`` and ``temperature``, and ``experts`` if samples have records; unit columns
    ``chosen_score`` and ``rejected_score`` (float64).
    """
    columns = batch.select_columns(["loss_mask", "temperature", EXPERTS])
    sides = columns.select([s.unit for pair in pairs for s in pair])
    scores_U2 = torch.tensor([[s.score for s in pair] for pair in pairs], dtype=torch.float64)
    unit = {"chosen_score": scores_U2[:, 0], "rejected_score": scores_U2[:, 1]}
    # The samples alternate, chosen and rejected: the units 2n and 2n + 1 become the roles 0 and 1 of pair n.
    return replace(sides, unit_B=sides.unit_B // 2, role_B=sides.unit_B % 2, unit=unit)


class DPO(PairLearning):
    """Prefer the chosen answers of the data's pairs, relative to a reference. It needs no reward model and no sampling.

    Each step of the run is one optimizer step on all pairs of the step. Pairs in which an answer has no trained token
    are left out and counted (metric ``pairs/left_out``), because their log-ratio would be 0 for every policy. Any loss
    over pairs fits the slot. There is a reference if the loss reads ``ref_logprobs``.
    """

    name = "dpo"
    source = "Rafailov et al. 2023, Direct preference optimization, arXiv:2305.18290"
    Config = SnapshotConfig
    slots = {"loss": Slot("loss", "dpo")}

    def __init__(
        self,
        config: ComponentConfig | None = None,
        parts: Mapping[str, Any] | None = None,
        run: RunOptions | None = None,
    ) -> None:
        super().__init__(config, parts, run)
        self.loss: Loss = self.parts["loss"]
        self._shift, self._rewards = 0.0, 0
        """The running mean of rewards, which ``bco_pair`` subtracts, and the number of rewards in it."""
        if self.config.snapshot_every is not None and not self.reads_reference:
            raise ConfigError(
                f"algorithm.snapshot_every = {self.config.snapshot_every} copies the policy to the reference, which "
                f"the loss {self.loss.name!r} with its current options does not read; remove algorithm.snapshot_every, "
                "or use a reference"
            )

    @property
    def reads_reference(self) -> bool:
        return "ref_logprobs" in self.loss.columns()

    @property
    def _running(self) -> bool:
        return getattr(self.loss.config, "bco_shift", "none") == "running"

    def needs(self) -> Needs:
        reference = (RoleSpec("reference", like="policy"),) if self.reads_reference else ()
        return Needs((RoleSpec("policy", trained=True), *reference))

    def annotations(self, step: int) -> list[Annotation]:
        return [Annotation("reference", "logprobs", "ref_logprobs")] if self.reads_reference else []

    def updates(self, step: int, batch: Batch | None = None) -> list[Update | Snapshot]:
        """The update and, when it is due, the snapshot. The snapshot comes last, so the next step computes
        ``ref_logprobs`` with the new reference."""
        coef = {"bco_shift": self._shift} if self._running else {}
        due = snapshots_due(self.config.snapshot_every, self.config.snapshot_share, step)
        return [Update("policy", "loss", *self.passes(batch), coef=coef), *due]

    def passes(self, batch: Batch | None) -> tuple[int, int]:
        """Epochs and minibatches of a step."""
        return 1, 1

    def finish(self, step: int, batch: Batch, metrics: Mapping[str, float]) -> dict[str, float]:
        """Add the step's rewards to the running mean. The loss reads the mean of earlier steps."""
        if not self._running:
            return {}
        used = self._shift
        if "policy/chosen_reward" in metrics:  # absent if the only update was skipped
            mean = (metrics["policy/chosen_reward"] + metrics["policy/rejected_reward"]) / 2
            # Each pair has two rewards.
            self._rewards += 2 * batch.units
            self._shift += (mean - self._shift) * 2 * batch.units / self._rewards
        return {"bco_shift": used}

    def state_dict(self) -> dict[str, Any]:
        return {"shift": self._shift, "rewards": self._rewards} if self._running else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self._running:
            self._shift, self._rewards = float(state["shift"]), int(state["rewards"])
        else:
            super().load_state_dict(state)


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


class OnlineDPO(DPO):
    """Sample, score, pair, train. With ``snapshot_every`` it is iterative DPO: every round has its own reference.

    The best of a prompt's samples is chosen and the worst is rejected; if several are equal, the first is used. Equal
    scores and equal answers give no pair. Metrics: ``pairs/made``, ``pairs/groups``, ``pairs/tied_groups`` (no two
    scores differ), ``pairs/equal_answers``, ``pairs/chosen_score``, ``pairs/rejected_score``.

    Deviations: (1) log-probs are of the sampling distribution (``sampling.temperature``), for policy and reference, as
    in TRL's online DPO. (2) OpenRLHF's iterative DPO keeps one reference for all rounds (leave out
    ``snapshot_every``) and pairs equal samples too.
    """

    name = "online_dpo"
    source = "Guo et al. 2024, Direct language model alignment from online AI feedback, arXiv:2402.04792"
    data = "prompts"
    Config = OnlineDPOConfig

    def needs(self) -> Needs:
        # "correction": pairs may come from any distribution, so sampling with top_p needs no importance weights.
        return replace(super().needs(), group_min=2, features=("correction",))

    def assemble(  # type: ignore[override]  # groups of samples, not pairs of the data
        self, examples: Sequence[Group]
    ) -> tuple[Batch | None, dict[str, float]]:
        samples = assemble(examples, self.run.step_sources)
        if samples is None:
            return None, {}
        pairs, metrics = pair_samples(samples, self.config.pairs, self.config.min_gap)
        if not pairs:
            return None, {}
        batch = as_pairs(samples, pairs)
        return batch, metrics | {
            "pairs/chosen_score": float(batch.unit["chosen_score"].mean()),
            "pairs/rejected_score": float(batch.unit["rejected_score"].mean()),
        }

    def passes(self, batch: Batch | None) -> tuple[int, int]:
        """At most one minibatch per pair. The number of pairs is not known before the samples are scored."""
        minibatches = self.config.minibatches if batch is None else min(self.config.minibatches, batch.units)
        return self.config.epochs, minibatches
