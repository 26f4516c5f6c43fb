"""The stream of training batches, as the loop sees it. :class:`WaveStream` generates whole batches in order. In
:mod:`rlhf_runtime.samples.continuous_stream`, samples continue while the policy learns. :class:`RecordedStream` repeats
the batches of another run."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rlhf.errors import TrainingError
from rlhf.interfaces import FinishedGroup
from rlhf.types import Group

from rlhf_runtime.checkpoint.saved_groups import FindRow, read_groups
from rlhf_runtime.data.dataset import TrainData
from rlhf_runtime.samples.acceptance import Acceptance
from rlhf_runtime.samples.pending_groups import oldest_version
from rlhf_runtime.samples.rollout_settings import RolloutSettings
from rlhf_runtime.samples.rollouts import Count, Rollouts, no_count


@dataclass(slots=True)
class ReadyBatch:
    """One generated batch, with counts of what happened to the prompts drawn for it."""

    groups: list[Group]
    version: int
    """Weight version with which its oldest sample was started."""
    counts: dict[str, float] = field(default_factory=dict)
    finished: list[FinishedGroup] = field(default_factory=list)
    """Every group that was generated for the batch, for the curriculum."""
    curriculum_metrics: dict[str, float] = field(default_factory=dict)
    """The curriculum's metrics of the batch."""


class Stream(ABC):
    """``start(step)`` generates the samples that a step may use, or lets them be generated. ``take(step)`` returns the
    step's batch."""

    @abstractmethod
    def start(self, step: int) -> None:
        """Called at the beginning of every step, with the weights that generation may use from now on."""

    @abstractmethod
    def take(self, step: int) -> ReadyBatch:
        """The batch of ``step``: scored, filtered and refilled. Each is taken once, in order."""

    @abstractmethod
    def samples_with(self, version: int) -> bool:
        """Whether training samples are drawn with the weights of ``version``."""

    @abstractmethod
    def snapshot(self, hook: Callable[[], object] = lambda: None) -> tuple[dict[str, Any], list[Group]]:
        """The state for a checkpoint: counters with the data order, and the groups that no step has trained on yet.

        Args:
            hook: called at the same moment. No row is chosen and no group ends between the snapshot and this call.
        """

    @abstractmethod
    def restore(self, state: Mapping[str, Any], groups: Sequence[Group]) -> None:
        """Continue from a :meth:`snapshot`."""

    @staticmethod
    @abstractmethod
    def saved_groups(state: Mapping[str, Any]) -> list[bool]:
        """For each group of a :meth:`snapshot` with these counters: whether its samples are complete."""

    def hold(self) -> None:  # noqa: B027 - whole batches are generated while nothing else is
        """Wait until the generator works on no training sample. It gets no further ones before :meth:`release`."""

    def release(self) -> None:  # noqa: B027
        """Continue after :meth:`hold`."""

    def close(self) -> None:  # noqa: B027 - a stream without background work has nothing to end
        """End all background work."""


class RecordedStream(Stream):
    """Batches that a run recorded in ``rollouts/``: the groups of each batch, with their tokens, log-probs, versions
    and rewards.

    Args:
        file: returns the file with the samples of the step that makes this number of finished steps.
        find: gives the row of a source at an index.
        oldest: largest number of steps between the weights of a token and the step that trains on it.
    """

    def __init__(self, file: Callable[[int], Path], find: FindRow, oldest: int) -> None:
        self._file, self._find, self._oldest = file, find, oldest
        self.batches_taken = 0

    def start(self, step: int) -> None:
        """Does nothing: every group is recorded."""

    def take(self, step: int) -> ReadyBatch:
        if step != self.batches_taken:
            raise TrainingError(
                f"the batch of step {step} was requested, but the next batch is of step {self.batches_taken}"
            )
        groups = read_groups(self._file(step + 1), self._find)
        self.batches_taken += 1
        # A batch of answers from the data has no token of any version.
        version = min((v for group in groups if (v := oldest_version(group)) is not None), default=step)
        if step - version > self._oldest:
            raise TrainingError(
                f"{self._file(step + 1)} records tokens of version {version} for step {step + 1}. With this run's "
                f"stream.staleness and stream.round they must be of version {step - self._oldest} or newer: the file "
                "belongs to another step or another run."
            )
        return ReadyBatch(groups, version)

    def samples_with(self, version: int) -> bool:
        return False

    def snapshot(self, hook: Callable[[], object] = lambda: None) -> tuple[dict[str, Any], list[Group]]:
        hook()
        return {"taken": self.batches_taken}, []

    @staticmethod
    def saved_groups(state: Mapping[str, Any]) -> list[bool]:
        return []

    def restore(self, state: Mapping[str, Any], groups: Sequence[Group]) -> None:
        self.batches_taken = state["taken"]


class WaveStream(Stream):
    """Whole batches that are generated in waves, in order. They are filtered, refilled, and taken in order.

    ::

        rows.take(missing) ──► rollouts.run ──► scored groups ──► failed? short? filter? ──┐
              ▲                                                          │ left out        │ kept
              └────────────── as long as the batch has room ◄────────────┘                 ▼
                                                                                   ready (a queue)
        start(step) stops when the queue holds step's round and ``staleness`` more batches │
                                                                                           ▼
                                                                           take(step): one batch per step

    Back-pressure: nothing is generated in the background. ``start`` generates what a step may use and returns, so at
    most ``round + staleness`` batches are ready, and generation waits for training. ``filter.max_rounds`` limits how
    often a batch is refilled.

    The weights that generate a batch are fixed by definition. With staleness S, batch k is generated with version
    max(0, k - S). With rounds of R steps, batch k is generated with version R * (k // R), so all batches of a round are
    generated at its first step. The checkpoint contains the generated batches that no step has trained on, so a resumed
    run trains on the same samples.

    A curriculum receives the groups of a batch when the batch is taken. The generator has the weights of version v only
    after the batches 0 to v - 1 were taken. So if a batch is generated with version v, the curriculum chooses its rows
    from the results of exactly the batches 0 to v - 1.
    """

    def __init__(
        self,
        rows: TrainData,
        rollouts: Rollouts,
        settings: RolloutSettings,
        *,
        batch_size: int,
        total_steps: int,
        staleness: int = 0,
        round: int = 1,
        acceptance: Acceptance | None = None,
        count: Count = no_count,
    ) -> None:
        self.rows, self.rollouts, self.settings = rows, rollouts, settings
        self.batch_size, self.total_steps, self.staleness, self.round = batch_size, total_steps, staleness, round
        self.acceptance = acceptance or Acceptance()
        self.count = count
        """Shows how many of the samples that are drawn together have ended."""
        self.generated = 0
        """Batches generated so far."""
        self.next_number = 0
        """Number of the next group of the run."""
        self.ready: deque[ReadyBatch] = deque()
        self._extended_at = 0
        """Step at which the run was resumed with a larger number of steps, else 0. With that number, some batches would
        have been generated earlier. They are generated at this step, with its weights."""

    def start(self, step: int) -> None:
        """Generate the missing batches of ``step``'s round and of the ``staleness`` batches after it.

        Raises TrainingError if the generator does not hold the weights with which a batch must be generated.
        """
        end = self._round_of(step) + self.round + self.staleness
        while self.generated < min(end, self.total_steps):
            expected, version = self.version_of(self.generated), self.rollouts.generator.version
            if version != expected:
                raise TrainingError(
                    f"batch {self.generated} must be generated with weight version {expected} (round {self.round}, "
                    f"staleness {self.staleness}), but the generator holds version {version}"
                )
            self.ready.append(self._generate())
            self.generated += 1

    def version_of(self, batch: int) -> int:
        """Version of the weights that batch number ``batch`` is generated with."""
        return max(self._extended_at, self._round_of(batch) - self.staleness)

    def samples_with(self, version: int) -> bool:
        return version in (self._round_of(version), self._extended_at)

    def _round_of(self, step: int) -> int:
        """First step of the round."""
        return step - step % self.round

    def take(self, step: int) -> ReadyBatch:
        """Groups are in the order of their numbers. Raises TrainingError if the oldest ready batch belongs to another
        step."""
        oldest = self.generated - len(self.ready)
        if not self.ready or oldest != step:
            oldest_ready = f"the oldest batch that is ready is of step {oldest}" if self.ready else "no batch is ready"
            raise TrainingError(f"the batch of step {step} was requested, but {oldest_ready}; call start({step}) first")
        batch = self.ready.popleft()
        if self.rows.curriculum is not None:
            self.rows.curriculum.tell(batch.finished)
        return batch

    def _generate(self) -> ReadyBatch:
        accepted: list[Group] = []
        finished: list[FinishedGroup] = []
        counts = self.acceptance.new_counts(self.settings.has_demonstrations)
        for _ in range(1 + self.acceptance.refills):
            missing = self.batch_size - len(accepted)
            if not missing:
                break
            rows = self.rows.take(missing, self.generated)
            groups = self.rollouts.run(rows, self.next_number, self.settings, self.count)
            self.next_number += len(rows)
            counts["prompts"] += len(rows)
            for group in groups:
                part, outcome = self.acceptance.accept(group, counts)
                if part is not None:
                    accepted.append(part)
                if self.rows.curriculum is not None:
                    finished.append(self.rows.curriculum.finished_group(group, self.generated, outcome))
        counts["short"] = float(self.batch_size - len(accepted))
        metrics = self.rows.curriculum.metrics() if self.rows.curriculum is not None else {}
        return ReadyBatch(accepted, self.rollouts.generator.version, counts, finished, metrics)

    def snapshot(self, hook: Callable[[], object] = lambda: None) -> tuple[dict[str, Any], list[Group]]:
        hook()
        state = {
            "rows": self.rows.state_dict(),
            "generated": self.generated,
            "next_number": self.next_number,
            "ready": [self._saved(batch) for batch in self.ready],
        }
        return state, [group for batch in self.ready for group in batch.groups]

    def _saved(self, batch: ReadyBatch) -> dict[str, Any]:
        saved = {"version": batch.version, "counts": batch.counts, "groups": len(batch.groups)}
        if self.rows.curriculum is not None:
            saved |= {"finished": [asdict(group) for group in batch.finished], "chosen": batch.curriculum_metrics}
        return saved

    @staticmethod
    def saved_groups(state: Mapping[str, Any]) -> list[bool]:
        return [True] * sum(batch["groups"] for batch in state["ready"])

    def restore(self, state: Mapping[str, Any], groups: Sequence[Group]) -> None:
        """``groups``: the groups of all ready batches, in order."""
        self.rows.load_state_dict(state["rows"])
        self.generated, self.next_number = state["generated"], state["next_number"]
        self.ready.clear()
        start = 0
        for ready in state["ready"]:
            end = start + ready["groups"]
            batch = ReadyBatch(list(groups[start:end]), ready["version"], dict(ready["counts"]))
            if self.rows.curriculum is not None:
                batch.finished = self.rows.curriculum.restored(ready.get("finished"))
                batch.curriculum_metrics = dict(ready.get("chosen", {}))
            self.ready.append(batch)
            start = end
        trained = self.generated - len(self.ready)
        due = self._round_of(trained - 1) + self.round + self.staleness if trained else 0
        self._extended_at = trained if self.generated < min(due, self.total_steps) else 0
