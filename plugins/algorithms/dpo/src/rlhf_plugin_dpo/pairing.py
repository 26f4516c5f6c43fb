"""Choose pairs among the samples of a prompt, and make a batch of pairs from a batch of samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from rlhf.ops.batch import Batch
from torch import Tensor

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


@dataclass(slots=True)
class Pairing:
    """Pairs (chosen, rejected), and counts of groups and pairs that were left out."""

    pairs: list[tuple[ScoredAnswer, ScoredAnswer]] = field(default_factory=list)
    groups: int = 0
    tied_groups: int = 0
    """Groups without two samples whose scores differ by more than the gap."""
    equal_answers: int = 0
    """Pairs left out because both answers are the same tokens."""

    def add(self, group: Sequence[ScoredAnswer], choice: PairChoice, min_gap: float) -> None:
        """Add the pairs of one group. ``best_worst``: the first of the best and the first of the worst. ``all``: every
        two samples. In both cases only if the scores differ by more than ``min_gap``."""
        ranked = sorted(group, key=lambda s: (-s.score, s.number))
        worst = min(group, key=lambda s: (s.score, s.number), default=None)
        if choice == "best_worst":
            candidates = [(ranked[0], worst)] if worst is not None else []
        else:
            candidates = [(a, b) for n, a in enumerate(ranked) for b in ranked[n + 1 :]]
        apart = [(a, b) for a, b in candidates if a.score - b.score > min_gap]
        pairs = [(a, b) for a, b in apart if a.answer != b.answer]
        self.groups += 1
        self.tied_groups += not apart
        self.equal_answers += len(apart) - len(pairs)
        self.pairs += pairs


def pair_samples(batch: Batch, choice: PairChoice, min_gap: float) -> Pairing:
    """The pairs of a batch of samples (:func:`rlhf.ops.trajectories.assemble`), groups in the batch's order.

    A sample's score is its reward plus the sum of its step rewards. Samples without a sampled token are in no pair.
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
    pairing = Pairing()
    for members in groups.values():
        pairing.add(members, choice, min_gap)
    return pairing


def scores(batch: Batch) -> Tensor:
    """float64 [U]: the reward of each sample with its step rewards."""
    step_U = torch.zeros(batch.units, dtype=torch.float64)
    return batch.unit["reward"] + step_U.index_add(0, batch.unit_N, batch.tok["step_reward"].double())


def as_pairs(batch: Batch, pairs: Sequence[tuple[ScoredAnswer, ScoredAnswer]]) -> Batch:
    """A unit for each pair: the sequences of the chosen sample with role 0, those of the rejected with role 1.

    Token columns ``loss_mask`` and ``temperature``; unit columns ``chosen_score`` and ``rejected_score`` (float64).
    """
    sides = batch.only(["loss_mask", "temperature"]).select([s.unit for pair in pairs for s in pair])
    scores_U2 = torch.tensor([[s.score for s in pair] for pair in pairs], dtype=torch.float64)
    unit = {"chosen_score": scores_U2[:, 0], "rejected_score": scores_U2[:, 1]}
    return replace(sides, unit_B=sides.unit_B // 2, role_B=sides.unit_B % 2, unit=unit)
