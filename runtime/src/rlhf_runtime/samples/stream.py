"""The stream of training batches: generated in order, filtered, refilled, and taken in order.

::

    rows.take(missing) ──► rollouts.run ──► scored groups ──► failed? short? filter? ──┐
          ▲                                                          │ left out        │ kept
          └────────────── as long as the batch has room ◄────────────┘                 ▼
                                                                               ready (a queue)
    start(step) stops when the queue has step's round and ``staleness`` batches more   │
                                                                                       ▼
                                                                       take(step): one batch per step

Back-pressure: nothing is generated in the background. ``start`` generates what a step may use and returns, so at most
``round + staleness`` batches are ready, and generation waits for training. ``filter.max_rounds`` limits how often a
batch is refilled.

Which weights a batch is generated with is a definition. Staleness S: batch k is generated with version max(0, k - S).
Rounds of R steps: with version R * (k // R), so all batches of a round are generated at its first step. Batches that
are generated and not yet trained on are in the checkpoint, so a resumed run trains on the very same samples.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from rlhf.errors import TrainingError
from rlhf.types import Group, Row

from rlhf_runtime.config.sections import FilterSection
from rlhf_runtime.samples.rollouts import Rollouts, RolloutSettings


class Rows(Protocol):
    """An endless, seeded, resumable order of rows (:class:`rlhf_runtime.data.order.RowOrder`)."""

    def take(self, n: int) -> list[Row]: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


@dataclass(slots=True)
class ReadyBatch:
    """One generated batch with what became of the prompts drawn for it."""

    groups: list[Group]
    version: int
    counts: dict[str, float] = field(default_factory=dict)


class Stream:
    """``start(step)`` generates every batch that step may use, ``take(step)`` hands out the step's own."""

    def __init__(
        self,
        rows: Rows,
        rollouts: Rollouts,
        settings: RolloutSettings,
        *,
        batch_size: int,
        total_steps: int,
        staleness: int = 0,
        round: int = 1,
        filter: FilterSection | None = None,
        on_failed_sample: Literal["abort", "drop_sample", "drop_group"] = "abort",
        group_min: int = 1,
        scored: bool = True,
    ) -> None:
        self.rows, self.rollouts, self.settings = rows, rollouts, settings
        self.batch_size, self.total_steps, self.staleness, self.round = batch_size, total_steps, staleness, round
        self.filter, self.on_failed_sample, self.group_min = filter, on_failed_sample, group_min
        self.scored = scored
        """Samples without a reward are left out."""
        self.generated = 0
        """Batches generated so far."""
        self.next_number = 0
        """Number of the next group of the run."""
        self.ready: deque[ReadyBatch] = deque()
        self._extended_at = 0
        """Step at which a run was resumed for more steps than it was to have: what it would have generated before, had
        it known, is generated now."""

    def start(self, step: int) -> None:
        """Generate what is missing of ``step``'s round and of the ``staleness`` batches behind it, each batch with
        the weights its definition asks for."""
        end = self._round_of(step) + self.round + self.staleness
        while self.generated < min(end, self.total_steps):
            expected, got = self.version_of(self.generated), self.rollouts.generator.version
            if got != expected:
                raise TrainingError(
                    f"batch {self.generated} must be generated with weight version {expected} (round {self.round}, "
                    f"staleness {self.staleness}), but the generator holds version {got}"
                )
            self.ready.append(self._generate())
            self.generated += 1

    def version_of(self, batch: int) -> int:
        """Version of the weights that batch number ``batch`` is generated with."""
        return max(self._extended_at, self._round_of(batch) - self.staleness)

    def samples_with(self, version: int) -> bool:
        """Whether training samples are drawn with the weights of ``version``; inside a round none are."""
        return version % self.round == 0

    def _round_of(self, step: int) -> int:
        """First step of the round."""
        return step - step % self.round

    def take(self, step: int) -> ReadyBatch:
        """The batch of ``step``: scored, filtered, refilled, in submission order. Each is taken once, in order.

        Raises TrainingError where the oldest batch is of another step.
        """
        oldest = self.generated - len(self.ready)
        if not self.ready or oldest != step:
            held = f"the oldest that is ready is of step {oldest}" if self.ready else "none is ready"
            raise TrainingError(f"the batch of step {step} was asked for, but {held}; start({step}) comes before it")
        return self.ready.popleft()

    def _generate(self) -> ReadyBatch:
        accepted: list[Group] = []
        counts = {"prompts": 0.0, "filtered": 0.0, "failed_samples": 0.0, "failed_groups": 0.0, "short": 0.0}
        counts["unscored"] = 0.0
        if self.settings.given:
            counts["given"] = 0.0
        rounds = 1 + (self.filter.max_rounds if self.filter else 0 if self.on_failed_sample == "abort" else 20)
        for _ in range(rounds):
            missing = self.batch_size - len(accepted)
            if not missing:
                break
            rows = self.rows.take(missing)
            groups = self.rollouts.run(rows, self.next_number, self.settings)
            self.next_number += len(rows)
            counts["prompts"] += len(rows)
            accepted += [kept for group in groups if (kept := self._admit(group, counts)) is not None]
        counts["short"] = float(self.batch_size - len(accepted))
        return ReadyBatch(accepted, self.rollouts.generator.version, counts)

    def _admit(self, group: Group, counts: dict[str, float]) -> Group | None:
        if any(t.given for t in group.trajectories):
            counts["given"] += 1
            return group
        failed = [t for t in group.trajectories if t.status == "failed"]
        counts["failed_samples"] += len(failed)
        if failed and self.on_failed_sample == "drop_group":
            counts["failed_groups"] += 1
            return None
        live = [t for t in group.trajectories if t.status != "failed"]
        kept = [t for t in live if t.reward is not None or not self.scored]
        counts["unscored"] += len(live) - len(kept)
        if len(kept) < max(1, self.group_min):
            counts["failed_groups"] += 1
            return None
        if self.filter is not None and not passes(self.filter, [t.score for t in kept if t.score is not None]):
            counts["filtered"] += 1
            return None
        return Group(group.row, group.number, kept)

    def state_dict(self) -> dict[str, Any]:
        """Counters and the data order; the ready batches are saved beside, as rollouts."""
        return {
            "rows": self.rows.state_dict(),
            "generated": self.generated,
            "next_number": self.next_number,
            "ready": [{"version": b.version, "counts": b.counts, "groups": len(b.groups)} for b in self.ready],
        }

    def load_state_dict(self, state: Mapping[str, Any], groups: Sequence[Group]) -> None:
        """``groups``: those of all ready batches, in order."""
        self.rows.load_state_dict(state["rows"])
        self.generated, self.next_number = state["generated"], state["next_number"]
        self.ready.clear()
        start = 0
        for ready in state["ready"]:
            end = start + ready["groups"]
            self.ready.append(ReadyBatch(list(groups[start:end]), ready["version"], dict(ready["counts"])))
            start = end
        trained = self.generated - len(self.ready)
        due = self._round_of(trained - 1) + self.round + self.staleness if trained else 0
        self._extended_at = trained if self.generated < min(due, self.total_steps) else 0


def left_out(counts: Mapping[str, float]) -> str:
    """Why samples of :attr:`ReadyBatch.counts` are not trained on; empty where none was left out."""
    reasons = {
        "unscored": "{:g} samples got no reward, as every reward returned None for them",
        "failed_samples": "{:g} samples failed",
        "filtered": "{:g} groups did not pass stream.filter",
    }
    return "; ".join(text.format(counts[name]) for name, text in reasons.items() if counts.get(name))


def passes(filter: FilterSection, scores: Sequence[float]) -> bool:
    """Whether a group's scores pass the dynamic filter; a group without scores does not.

    low < mean < high (both strict) and std > min_std, each where configured. arXiv:2503.14476 has low = 0, high = 1 on
    0/1 scores; ``min_std`` also catches constant groups of other rewards. std is the population's.
    """
    if not scores:
        return False
    least = min(scores)  # what is above it is exactly 0 for equal scores: the mean of three times 0.1 is not 0.1
    above = math.fsum(s - least for s in scores) / len(scores)
    if filter.low is not None and not filter.low < least + above:
        return False
    if filter.high is not None and not least + above < filter.high:
        return False
    if filter.min_std is not None:
        std = math.sqrt(math.fsum((s - least - above) ** 2 for s in scores) / len(scores))
        return std > filter.min_std
    return True
