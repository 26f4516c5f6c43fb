"""Choose the best samples of each prompt in a batch."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from rlhf.ops.batch import Batch


@dataclass(slots=True)
class Best:
    """The kept samples of a batch, and statistics."""

    units: list[int] = field(default_factory=list)
    """Indices of the kept samples in the batch: group by group, the best of each first."""
    empty_groups: int = 0
    """Groups without a kept sample."""
    ties: int = 0
    """Groups in which a sample was left out although its reward equals that of the worst kept one."""
    mean: float = 0.0
    """Mean reward of all samples with at least one sampled token."""
    mean_kept: float = 0.0


def best_of(samples: Batch, keep: int, min_reward: float | None = None) -> Best:
    """The ``keep`` best of each group of a batch of samples (:func:`rlhf.ops.trajectories.assemble`).

    A sample's reward is its outcome reward plus the sum of its step rewards. Ties go to the lower sample number.
    Samples without a sampled token are ignored.

    Args:
        min_reward: samples below it are not kept.
    """
    steps_U = torch.zeros(samples.units, dtype=torch.float64)
    steps_U.index_add_(0, samples.unit_N, samples.tok["step_reward"].double())
    reward_U: list[float] = (samples.unit["reward"] + steps_U).tolist()
    own_U, number_U = samples.unit["own_tokens"].tolist(), samples.unit["sample"].tolist()
    groups: dict[int, list[int]] = {}
    for u, group in enumerate(samples.unit["group"].tolist()):
        groups.setdefault(group, []).append(u)
    best = Best()
    for members in groups.values():
        passing = [u for u in members if own_U[u] and (min_reward is None or reward_U[u] >= min_reward)]
        ranked = sorted(passing, key=lambda u: (-reward_U[u], number_U[u]))
        best.units += ranked[:keep]
        best.empty_groups += not ranked
        best.ties += len(ranked) > keep and reward_U[ranked[keep]] == reward_U[ranked[keep - 1]]
    best.mean = _mean([r for r, own in zip(reward_U, own_U, strict=True) if own])
    best.mean_kept = _mean([reward_U[u] for u in best.units])
    return best


def _mean(values: list[float]) -> float:
    return math.fsum(values) / len(values) if values else 0.0
