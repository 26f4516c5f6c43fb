"""Selects the scored groups to train on. Failed and unscored samples are left out, and the dynamic filter rejects
groups."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from rlhf.interfaces.curriculum import Outcome
from rlhf.types import Group, Trajectory

from rlhf_runtime.config.sections import FilterSection
from rlhf_runtime.observe.timeline import NO_TIMELINE, Timeline


@dataclass(frozen=True, slots=True)
class Acceptance:
    """The rules by which a group enters a training batch."""

    filter: FilterSection | None = None
    on_failed_sample: Literal["abort", "drop_sample", "drop_group"] = "abort"
    group_min: int = 1
    """Smallest number of samples in a group, counted over all agents that the policy plays."""
    scored: bool = True
    """Whether samples without a reward are left out."""
    timeline: Timeline = NO_TIMELINE
    """Gets an event for every group that is rejected."""

    @property
    def refills(self) -> int:
        """How often rejected groups of a batch are replaced."""
        return self.filter.max_rounds if self.filter else 0 if self.on_failed_sample == "abort" else 20

    def new_counts(self, has_demonstrations: bool) -> dict[str, float]:
        """A zero for everything that :meth:`accept` counts, and for the drawn prompts.

        Args:
            has_demonstrations: whether some groups contain answers of the data (``Needs.demonstration_share``).
        """
        names = ["prompts", "filtered", "scored", "failed_samples", "failed_groups", "short", "unscored"]
        names += ["tokens_filtered", "tokens_failed", "tokens_unscored"]
        return dict.fromkeys([*names, "demonstrations"] if has_demonstrations else names, 0.0)

    def accept(self, group: Group, counts: dict[str, float]) -> tuple[Group | None, Outcome]:
        """(the part of the group to train on, None if the group is rejected; its outcome for a curriculum). The reason
        is counted in ``counts``. The filter accepts a group if it accepts the samples of one agent."""
        # The answer of the data is the whole group (Needs.demonstration_share). It has no reward, and needs none.
        if all(t.is_demonstration for t in group.trajectories):
            counts["demonstrations"] += 1
            return group, "kept"
        failed = [t for t in group.trajectories if t.status == "failed"]
        live = [t for t in group.trajectories if t.status != "failed"]
        counts["failed_samples"] += len(failed)
        counts["scored"] += sum(t.reward is not None for t in live)
        if failed and self.on_failed_sample == "drop_group":
            self.reject(group, counts, "failed", group.trajectories)
            return None, "left_out"
        trajectories = [t for t in live if t.reward is not None or not self.scored]
        counts["unscored"] += len(live) - len(trajectories)
        counts["tokens_failed"] += sampled_tokens(failed)
        counts["tokens_unscored"] += sampled_tokens(live) - sampled_tokens(trajectories)
        if len({t.index for t in trajectories}) < max(1, self.group_min):
            self.reject(group, counts, "failed", trajectories)
            return None, "left_out"
        part = Group(group.row, group.number, trajectories)
        if self.filter is not None and not any(
            passes(self.filter, scores_of(samples)) for samples in part.by_agent().values()
        ):
            self.reject(group, counts, "filtered", trajectories)
            return None, "filtered"
        return part, "kept"

    def reject(
        self,
        group: Group,
        counts: dict[str, float],
        cause: Literal["filtered", "failed", "stale"],
        samples: Sequence[Trajectory],
    ) -> None:
        """Count a group that is not trained on.

        Args:
            samples: samples of the group that are not counted yet.
        """
        counts["failed_groups" if cause == "failed" else cause] += 1
        counts[f"tokens_{cause}"] += sampled_tokens(samples)
        self.timeline.instant(f"group {cause}", group=group.number)


def sampled_tokens(trajectories: Iterable[Trajectory]) -> int:
    """Number of tokens that the policy sampled."""
    return sum(trajectory.sampled_tokens for trajectory in trajectories)


def scores_of(group: Group) -> list[float]:
    return [t.score for t in group.trajectories if t.score is not None]


def left_out(counts: Mapping[str, float]) -> str:
    """Why samples counted in :attr:`ReadyBatch.counts` are not trained on; empty if none was left out."""
    reasons = {
        "unscored": "{:g} samples got no reward, because every reward returned None for them",
        "failed_samples": "{:g} samples failed",
        "filtered": "{:g} groups did not pass stream.filter",
    }
    return "; ".join(text.format(counts[name]) for name, text in reasons.items() if counts.get(name))


def passes(filter: FilterSection, scores: Sequence[float]) -> bool:
    """Whether a group's scores pass the dynamic filter. A group without scores does not pass.

    Conditions, each only if configured: low < mean < high (both strict), and std > min_std (population standard
    deviation). arXiv:2503.14476 uses low = 0 and high = 1 on 0/1 scores; ``min_std`` also rejects groups of equal
    scores for other rewards.
    """
    if not scores:
        return False
    # Differences from the minimum are exactly 0 for equal scores. Without it, the mean of [0.1, 0.1, 0.1] is not 0.1.
    lowest = min(scores)
    offset = math.fsum(s - lowest for s in scores) / len(scores)
    if filter.low is not None and not filter.low < lowest + offset:
        return False
    if filter.high is not None and not lowest + offset < filter.high:
        return False
    if filter.min_std is not None:
        std = math.sqrt(math.fsum((s - lowest - offset) ** 2 for s in scores) / len(scores))
        return std > filter.min_std
    return True
