"""Groups that were started and that no step has trained on yet, and the choice of groups for the next batch."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Literal

from rlhf.types import Group, Row, Trajectory

from rlhf_runtime.samples.sample_context import TurnLog

Order = Literal["submission", "completion"]


@dataclass(slots=True)
class Pending:
    """One group that was started."""

    number: int
    row: Row
    version: int
    """Weight version when the group was started. None of its tokens is older."""
    logs: list[TurnLog]
    """For each sample, the turns that were sampled so far."""
    group: Group | None = None
    """The group to train on; None until all samples are scored."""
    finished: int = 0
    """Position in the order of completion."""
    task: asyncio.Task[None] | None = field(default=None, repr=False)

    def saved(self) -> tuple[dict[str, Any], Group]:
        """The group as a checkpoint stores it: its state and its samples. The samples of a group that is not scored are
        the turns sampled so far."""
        state: dict[str, Any] = {"version": self.version, "scored": self.group is not None, "finished": self.finished}
        if self.group is not None:
            return state, self.group
        logs = [log.entries() for log in self.logs]
        state["logs"] = [[[number, context] for number, context, _ in entries] for entries in logs]
        turns = [[turn for _, _, turn in entries] for entries in logs]
        samples = [Trajectory(self.row, own_turns, (self.number, s)) for s, own_turns in enumerate(turns)]
        return state, Group(self.row, self.number, samples)

    @classmethod
    def restored(cls, state: Mapping[str, Any], group: Group) -> Pending:
        """The group from the values of :meth:`saved`."""
        if state["scored"]:
            return cls(group.number, group.row, state["version"], [], group, state["finished"])
        logs = []
        for saved_log, sample in zip(state["logs"], group.trajectories, strict=True):
            turns = zip(saved_log, sample.turns, strict=True)
            logs.append(TurnLog((number, context, turn) for (number, context), turn in turns))
        return cls(group.number, group.row, state["version"], logs, None, state["finished"])


class PendingGroups:
    """Groups in the order in which they were started.

    **The promise of staleness** S: no token that step k trains on is older than version k - S. A group that was started
    at version v must therefore be in a batch of step v + S at the latest: its *deadline*. :meth:`room` allows no more
    groups than the steps up to that deadline will train on, so every deadline can be met. :meth:`choose` takes so many
    old groups that this stays so. The last possible batch of a slow group waits for it. No group is discarded because
    it is slow.
    """

    def __init__(
        self, batch_size: int, total_steps: int, staleness: int, order: Order, oversample: float | None
    ) -> None:
        self.batch_size, self.total_steps, self.staleness = batch_size, total_steps, staleness
        self.order, self.oversample = order, oversample
        self.running = 0
        """Number of groups whose samples are not all scored."""
        self._groups: dict[int, Pending] = {}
        self._counts: Counter[int] = Counter()
        """{version: number of groups}."""
        self._scored: Counter[int] = Counter()
        """{version: number of scored groups}."""

    def __len__(self) -> int:
        return len(self._groups)

    def __iter__(self) -> Iterator[Pending]:
        return iter(list(self._groups.values()))

    def add(self, pending: Pending) -> None:
        """Add a group that was started after all others."""
        self._groups[pending.number] = pending
        self._counts[pending.version] += 1
        self._count(pending, 1)

    def scored(self, pending: Pending, group: Group, finished: int) -> None:
        """Called when all samples of ``pending`` are scored and ``group`` is to be trained on."""
        self._count(pending, -1)
        pending.group, pending.finished = group, finished
        self._count(pending, 1)

    def remove(self, pending: Pending) -> None:
        if self._groups.pop(pending.number, None) is None:
            return
        self._count(pending, -1)
        self._counts[pending.version] -= 1
        if not self._counts[pending.version]:
            del self._counts[pending.version]
            self._scored.pop(pending.version, None)

    def _count(self, pending: Pending, change: int) -> None:
        if pending.group is None:
            self.running += change
        else:
            self._scored[pending.version] += change

    def room(self, step: int, version: int) -> int:
        """How many groups may be started now.

        Args:
            step: the step that takes the next batch.
            version: version of the weights with which new groups start.
        """
        steps = min(version + self.staleness - step + 1, self.total_steps - step)
        limit = steps * self.batch_size
        if self.oversample is not None:
            limit = min(limit, math.ceil(self.oversample * self.batch_size))
        return max(0, limit - len(self))

    def choose(self, step: int) -> list[Pending] | None:
        """The groups of the batch of ``step``, in the order in which they were started; None while they are not all
        scored.

        ``submission`` takes the oldest groups. ``completion`` takes the groups that were scored first, but so many old
        ones that the others can still meet their deadlines.
        """
        if not self._ready(step):
            return None
        if self.order == "submission":
            return list(islice(self._groups.values(), self.batch_size))
        scored = sorted((p for p in self if p.group is not None), key=lambda pending: pending.finished)
        chosen: dict[int, Pending] = {}
        for version, quota in [*self._quotas(step), (math.inf, self.batch_size)]:
            rest = (p for p in scored if p.version <= version and p.number not in chosen)
            chosen |= {p.number: p for p in islice(rest, max(0, quota - len(chosen)))}
        return [chosen[number] for number in sorted(chosen)]

    def _quotas(self, step: int) -> Iterator[tuple[int, int]]:
        """(version, how many groups of this or an older version the batch of ``step`` must take): those that the later
        steps up to their deadline cannot train on."""
        count = 0
        for version in sorted(self._counts):
            count += self._counts[version]
            later_steps = max(0, version + self.staleness - step)
            yield version, min(self.batch_size, count - later_steps * self.batch_size)

    def _ready(self, step: int) -> bool:
        """Whether the batch is scored. Called after every completion, so it must not look at every group."""
        if len(self) - self.running < self.batch_size:
            return False
        if self.order == "submission":
            return all(pending.group is not None for pending in islice(self._groups.values(), self.batch_size))
        scored = 0
        for version, quota in self._quotas(step):
            scored += self._scored[version]
            if scored < quota:
                return False
        return True


def oldest_version(group: Group) -> int | None:
    """The oldest weight version of a token that the policy sampled; None if it sampled none."""
    sampled = [turn for trajectory in group.trajectories for turn in trajectory.turns if turn.sampled]
    return min((version for turn in sampled for _, version in turn.versions), default=None)


def age(group: Group, step: int) -> int | None:
    """How many steps older the group's oldest sampled token is than the weights of ``step``; None if it has no such
    token."""
    oldest = oldest_version(group)
    return None if oldest is None else step - oldest
