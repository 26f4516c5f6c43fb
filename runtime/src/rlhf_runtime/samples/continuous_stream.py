"""Batches from samples that continue while the policy learns.

::

    rows ──► start groups, as many as staleness allows ──► samples run, each by itself ──► scored ──► filter ──┐
                     ▲                                                                        rejected │       │ kept
                     └───── room: (version + S - step + 1) batches, less the pending groups ◄──────────┘       ▼
                                                                                                  pending groups
                                                                  take(step): one batch ◄── submission or completion

Threads: samples run on the event loop (:class:`rlhf_runtime.calls.main_thread.MainThread`), in the background of the
main thread. :meth:`start` and :meth:`take` are called on the main thread.

Back-pressure: new groups are started when a step has taken its batch, when new weights have arrived, and when a group
was rejected, but never more than the room allows. So learning waits for samples, samples wait for learning, and nothing
grows without bound.

Checkpoints: a checkpoint contains the order of rows and every pending group. A scored group is saved completely. A
group that is not scored is saved with the turns sampled so far, and its rollouts run again with these turns. So each
prompt is trained on once, rejected by a named rule, or still to come.

A curriculum is called on the event loop, to choose rows and to receive results of groups
(:class:`ContinuousCurriculum`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from statistics import median
from typing import Any, TypeVar

from rlhf.errors import CheckpointError, StandstillError, TrainingError
from rlhf.interfaces import FinishedGroup
from rlhf.interfaces.curriculum import Outcome
from rlhf.saved import WAY_OUT
from rlhf.types import Group, Row

from rlhf_runtime.data.dataset import TrainData
from rlhf_runtime.data.row_order import CurriculumOrder
from rlhf_runtime.samples.acceptance import Acceptance
from rlhf_runtime.samples.pending_groups import Order, Pending, PendingGroups, age
from rlhf_runtime.samples.requests import SingleRequests
from rlhf_runtime.samples.rollout_settings import RolloutSettings
from rlhf_runtime.samples.rollouts import Count, Rollouts, no_count
from rlhf_runtime.samples.sample_context import TurnLog
from rlhf_runtime.samples.stream import ReadyBatch, Stream

T = TypeVar("T")
LOOK = 1.0
"""Seconds between two checks for dead engines while a step waits for its batch."""

AT_ONCE = 64
"""Groups that are started before other coroutines have a turn, so that a large batch does not block the event loop."""

RESTARTED = {
    "weights": "tokens_restarted_weights",
    "engine": "tokens_restarted_engine",
    "resume": "tokens_restarted_resume",
}
"""{why tokens are sampled again: name of their count}. The first two reasons are from ``Generator.restarted``."""
COUNTS = ("stale", "tokens_stale", *RESTARTED.values())


class ContinuousStream(Stream):
    """The stream of ``stream.mode = "continuous"``. The module docstring says when groups start and which groups a
    batch takes.

    Args:
        order: which scored groups a batch takes (``stream.order``).
        oversample: largest number of batches that may be pending at once; None: as many as staleness allows.
    """

    def __init__(
        self,
        rows: TrainData,
        rollouts: Rollouts,
        settings: RolloutSettings,
        *,
        batch_size: int,
        total_steps: int,
        staleness: int,
        order: Order = "submission",
        oversample: float | None = None,
        acceptance: Acceptance | None = None,
        count: Count = no_count,
    ) -> None:
        assert rollouts.pool is not None
        self.rows, self.rollouts, self.settings, self.pool = rows, rollouts, settings, rollouts.pool
        self.acceptance = acceptance or Acceptance()
        self.curriculum = None if rows.curriculum is None else ContinuousCurriculum(rows, rows.curriculum, batch_size)
        """None if no curriculum decides the order of ``rows``."""
        self.count = count
        """Shows how many of the groups that a batch waits for are scored."""
        self.pending = PendingGroups(batch_size, total_steps, staleness, order, oversample)
        self.next_number = 0
        """Number of the next group of the run."""
        self.batches_taken = 0
        """Batches taken so far."""
        self._counts = self._new_counts()
        """Counts about the groups that ended since the last batch."""
        self._rejected = 0
        """Groups that were rejected since the last batch."""
        self._finished = 0
        self._requests: SingleRequests | None = None
        self._change = asyncio.Event()
        self._failure: BaseException | None = None

    # ------------------------------------------------------------------------------ on the main thread

    def start(self, step: int) -> None:
        """Start groups with the new weights, without waiting for them."""
        if self._requests is None:
            self.pool.idle()  # the share of idle time counts from here on
        self._run(self._begin())

    def take(self, step: int) -> ReadyBatch:
        """Wait for the batch of ``step``. Raises the error of a sample if that error ends the run."""
        if step != self.batches_taken:
            raise TrainingError(
                f"the batch of step {step} was requested, but the next batch is of step {self.batches_taken}"
            )
        ready = self._run(self._take(step))
        if (seconds := self.pool.idle()) is not None and seconds[1] > 0:
            ready.counts["idle"] = seconds[0] / seconds[1]
        for cause, tokens in self.pool.restarted().items():
            ready.counts[RESTARTED[cause]] += tokens
        return ready

    def samples_with(self, version: int) -> bool:
        return True

    def snapshot(self, hook: Callable[[], object] = lambda: None) -> tuple[dict[str, Any], list[Group]]:
        return self._run(self._snapshot(hook))

    @staticmethod
    def saved_groups(state: Mapping[str, Any]) -> list[bool]:
        return [pending["scored"] for pending in state["pending"]]

    def restore(self, state: Mapping[str, Any], groups: Sequence[Group]) -> None:
        """``groups``: one for each of ``state["pending"]``."""
        self.rows.load_state_dict(state["rows"])
        self.next_number, self.batches_taken, self._finished = state["next_number"], state["taken"], state["finished"]
        self._rejected = state["rejected"]
        self._counts |= state["counts"]
        # Turns that were being sampled are not in the checkpoint, so their tokens are sampled a second time.
        self._counts[RESTARTED["resume"]] += state["unfinished_tokens"]
        if self.curriculum is not None:
            self.curriculum.load_state_dict(state.get("chosen"))
        for saved, group in zip(state["pending"], groups, strict=True):
            self.pending.add(Pending.restored(saved, group))

    def hold(self) -> None:
        self._run(self._hold())

    def release(self) -> None:
        if self._requests is not None:
            self.rollouts.main.from_main(self._requests.release)

    def close(self) -> None:
        with suppress(StandstillError):  # its cause was raised before
            self._run(self._end())

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return self.rollouts.main.run(coroutine)

    # ------------------------------------------------------------------------------- on the event loop

    async def _begin(self) -> None:
        if self._requests is None:
            self._requests = SingleRequests(self.pool, self.rollouts.places)
            for pending in self.pending:
                if pending.group is None:  # restored from a checkpoint
                    self._launch(pending, self._requests)
        await self._start_groups(self._requests)

    async def _start_groups(self, requests: SingleRequests) -> None:
        started = 0
        while room := self.pending.room(self.batches_taken, version := self.pool.version):
            if self._failure is not None or self._exhausted:
                return
            rows = (
                self.rows.take(1)
                if self.curriculum is None
                else self.curriculum.take(self.batches_taken, len(self.pending), room)
            )
            # A checkpoint may be saved during sleep(): a row that was taken must be counted and in a pending group by
            # then.
            self._counts["prompts"] += len(rows)
            for pending in [self._add(row, version) for row in rows]:
                self._launch(pending, requests)
                started += 1
                if started % AT_ONCE == 0:
                    await asyncio.sleep(0)

    def _add(self, row: Row, version: int) -> Pending:
        logs = [TurnLog() for _ in range(self.settings.answers)]
        pending = Pending(self.next_number, row, version, logs)
        self.next_number += 1
        self.pending.add(pending)
        return pending

    def _launch(self, pending: Pending, requests: SingleRequests) -> None:
        pending.task = asyncio.get_running_loop().create_task(self._generate(pending, requests))

    async def _generate(self, pending: Pending, requests: SingleRequests) -> None:
        try:
            samples = self.settings.samples
            if self.settings.failures is not None and not self.settings.is_demonstration(
                pending.number, pending.row.source
            ):
                self.settings.failures.expect(samples, at_least=self.pending.batch_size * samples)
            group = await self.rollouts.group(pending.row, pending.number, self.settings, requests, pending.logs)
            self._finish_group(pending, group)
            self._change.set()
            await self._start_groups(requests)
        except asyncio.CancelledError:
            raise
        except Exception as error:  # raised by a sample, or by the row or the curriculum of the next group
            self._failure = self._failure or error
        self._change.set()

    def _finish_group(self, pending: Pending, group: Group) -> None:
        """Called when all samples of ``group`` are scored."""
        accepted, outcome = self.acceptance.accept(group, self._counts)
        self._finished += 1
        if accepted is not None:
            self.pending.scored(pending, accepted, self._finished)
            return
        self.pending.remove(pending)
        self._rejected += 1
        if self.curriculum is not None:
            self.curriculum.rejected(group, outcome)

    async def _take(self, step: int) -> ReadyBatch:
        batch: list[Pending] | None = None
        while batch is None:
            self._change.clear()
            if self._failure is not None:
                raise self._failure
            batch = self.pending.choose(step)
            if batch is None and self._exhausted and not self.pending.running:
                batch = list(self.pending)[: self.pending.batch_size]
            batch = self._fresh(step, batch)
            if batch is None:
                size = self.pending.batch_size
                self.count(min(len(self.pending) - self.pending.running, size), size)
                await self._wait(self._change)
        for pending in batch:
            self.pending.remove(pending)
        groups = [pending.group for pending in batch if pending.group is not None]
        self.batches_taken += 1
        return self._ready(step, groups, min((p.version for p in batch), default=self.pool.version))

    async def _hold(self) -> None:
        if self._requests is not None:
            quiet = self._requests.hold()
            while not quiet.is_set():
                await self._wait(quiet)

    async def _wait(self, event: asyncio.Event) -> None:
        """Wait for about a second. The main thread has no other work meanwhile, so it replaces dead engines."""
        try:
            await asyncio.wait_for(event.wait(), LOOK)
        except TimeoutError:
            await self.rollouts.main.call(self.pool.repair)

    def _fresh(self, step: int, batch: list[Pending] | None) -> list[Pending] | None:
        """``batch`` if no token in it is older than the staleness allows. Otherwise None, and old groups are drawn
        again."""
        # choose() gives no old groups, but an engine that was just replaced may have sampled with older weights.
        scored = [(pending, pending.group) for pending in batch or [] if pending.group is not None]
        old = [(pending, group) for pending, group in scored if (age(group, step) or 0) > self.pending.staleness]
        for pending, group in old:
            self.pending.remove(pending)
            assert self._requests is not None
            self.acceptance.reject(group, self._counts, "stale", group.trajectories)
            self._launch(self._add(pending.row, self.pool.version), self._requests)
        return batch if not old else None

    def _ready(self, step: int, groups: list[Group], version: int) -> ReadyBatch:
        counts, self._counts, self._rejected = self._counts, self._new_counts(), 0
        ages = [steps for group in groups if (steps := age(group, step)) is not None]
        counts |= {"short": float(self.pending.batch_size - len(groups)), "oldest": float(max(ages, default=0))}
        counts["age"] = float(median(ages)) if ages else 0.0
        counts |= {"running": float(self.pending.running), "waiting": float(len(self.pending) - self.pending.running)}
        metrics = {} if self.curriculum is None else self.curriculum.finish(step, groups)
        return ReadyBatch(groups, version, counts, curriculum_metrics=metrics)

    def _new_counts(self) -> dict[str, float]:
        return self.acceptance.new_counts(self.settings.has_demonstrations) | dict.fromkeys(COUNTS, 0.0)

    @property
    def _exhausted(self) -> bool:
        """Whether so many groups were rejected that the next batch is not refilled any more."""
        return self._rejected > self.acceptance.refills * self.pending.batch_size

    async def _snapshot(self, hook: Callable[[], object]) -> tuple[dict[str, Any], list[Group]]:
        """The result of :meth:`snapshot`. It is taken on the event loop, so that no sample ends meanwhile."""
        hook()
        saved = [pending.saved() for pending in self.pending]
        state = {
            "rows": self.rows.state_dict(),
            "next_number": self.next_number,
            "taken": self.batches_taken,
            "finished": self._finished,
            "rejected": self._rejected,
            "counts": dict(self._counts),
            "unfinished_tokens": self.pool.unfinished_tokens() if self._requests is not None else 0,
            "pending": [state for state, _ in saved],
        }
        if self.curriculum is not None:
            state["chosen"] = self.curriculum.state_dict()
        return state, [group for _, group in saved]

    async def _end(self) -> None:
        tasks = [pending.task for pending in self.pending if pending.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class ContinuousCurriculum:
    """Lets a curriculum choose the rows of groups when the groups are started. At that moment the curriculum has
    received the groups of every batch that was taken before, and every group that was rejected before the last of these
    batches was taken.

    Groups are started when a step has taken its batch and when a group was rejected. So without rejected groups and
    without ``stream.oversample``, the rows of the n-th batch in the order of submission are chosen from the results of
    batches 0 to n - staleness - 1, as in waves.
    """

    def __init__(self, rows: TrainData, order: CurriculumOrder, batch_size: int) -> None:
        self._rows, self._order, self._batch_size = rows, order, batch_size
        self._step = 0
        """The step for which rows were last chosen."""
        self._rejected: list[FinishedGroup] = []
        """Groups that were rejected since the last batch was taken."""
        self._metrics: dict[int, dict[str, float]] = {}
        """{step: the curriculum's metrics when rows were last chosen for it}."""

    def take(self, batches: int, pending: int, room: int) -> list[Row]:
        """Rows of one batch, at most ``room``.

        Args:
            batches: batches taken so far.
            pending: groups that were started and are not trained on yet.
            room: how many groups may be started, at least 1.
        """
        # If groups are counted in order of submission, the next one belongs to batch `step`, of which `begun` exist.
        step, begun = divmod(batches * self._batch_size + pending, self._batch_size)
        self._step = max(self._step, step)  # a group that was chosen for a later step may replace a rejected group
        rows = self._rows.take(min(room, self._batch_size - begun), self._step)
        self._metrics[self._step] = self._order.metrics()
        return rows

    def rejected(self, group: Group, outcome: Outcome) -> None:
        """Called when a group is rejected, so that it is not trained on."""
        self._rejected.append(self._order.finished_group(group, 0, outcome))

    def finish(self, step: int, groups: Sequence[Group]) -> dict[str, float]:
        """Pass the batch of ``step`` to the curriculum. Returns the curriculum's metrics for the batch."""
        finished = [self._order.finished_group(group, step, "kept") for group in groups]
        finished += [replace(group, step=step) for group in self._rejected]
        self._rejected = []
        self._order.tell(sorted(finished, key=lambda group: group.number))
        return self._metrics.pop(step, {})

    def state_dict(self) -> dict[str, Any]:
        metrics = {str(step): values for step, values in self._metrics.items()}
        return {"step": self._step, "rejected": [asdict(group) for group in self._rejected], "metrics": metrics}

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Raises CheckpointError if the checkpoint is from a run without a curriculum."""
        if state is None:
            raise CheckpointError(f"stream.chosen of the checkpoint is missing. {WAY_OUT}")
        self._step, self._rejected = state["step"], self._order.restored(state["rejected"])
        self._metrics = {int(step): dict(values) for step, values in state["metrics"].items()}
