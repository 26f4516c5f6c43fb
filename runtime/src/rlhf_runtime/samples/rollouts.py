"""Turns data rows into scored groups: runs the rollout plugin once per sample, then the rewards once per group."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace

from rlhf.errors import ModelError, RlhfError, RolloutError, SyncError, TrainingError, WorkerError, boundary
from rlhf.interfaces import EnginePool, Generator
from rlhf.ops.experts import drop_repeated
from rlhf.seeds import derive_seed
from rlhf.types import Group, Row, Trajectory, Turn
from rlhf.types.needs import GREEDY_REWARD

from rlhf_runtime.calls.main_thread import MainThread
from rlhf_runtime.calls.returned_values import InvalidResult, check_turns
from rlhf_runtime.models.shared_devices import Phases
from rlhf_runtime.models.weight_sync import WeightSync
from rlhf_runtime.observe.timeline import NO_TIMELINE, Slice, Timeline
from rlhf_runtime.samples.failures import describe
from rlhf_runtime.samples.requests import Places, Requests, SingleRequests, Waves
from rlhf_runtime.samples.rollout_settings import TRAINING, RolloutSettings
from rlhf_runtime.samples.sample_context import SampleContext, SampleParts, TurnLog

FATAL = (WorkerError, SyncError, TrainingError, ModelError)
"""Errors of the generator or of its weights, not of one sample. They end the run regardless of ``on_failed_sample``."""

Count = Callable[[int, int], None]
"""Shows progress: called with (number done, number in all)."""


def no_count(number: int, total: int) -> None:
    """Shows nothing."""


class Rollouts:
    """``run(rows, first_number, settings)`` returns one scored group per row, in order."""

    def __init__(
        self,
        parts: SampleParts,
        generator: Generator,
        main: MainThread,
        phases: Phases | None = None,
        pool: EnginePool | None = None,
        timeline: Timeline = NO_TIMELINE,
    ) -> None:
        self.parts, self.generator, self.main, self.phases, self.timeline = parts, generator, main, phases, timeline
        limits = parts.rollout.concurrency, None if parts.episodes is None else parts.episodes.limit
        self.limit = min((n for n in limits if n is not None), default=None)
        """Largest number of live samples, if the environment or the rollout has such a limit."""
        self.pool = pool
        """The generator, if requests are sent individually instead of in waves."""
        self.places = Places(self.limit) if pool is not None and self.limit is not None else None
        """The places of live samples, if requests are sent individually."""
        self.sampled_tokens = 0
        """Number of tokens that this process sampled for all training samples that have ended, including turns that the
        rollout did not return."""

    def run(
        self, rows: Sequence[Row], first_number: int, settings: RolloutSettings, count: Count = no_count
    ) -> list[Group]:
        """Blocks until every group is complete and scored. A failed sample raises if ``settings.abort_on_failure``;
        otherwise it is returned with status ``failed``.

        Args:
            count: called after each sample with (samples that have ended, all samples), on the event loop.
        """
        with self.phases.generating() if self.phases is not None else nullcontext():
            return self.main.run(self._groups(rows, first_number, settings, count))

    async def _groups(
        self, rows: Sequence[Row], first_number: int, settings: RolloutSettings, count: Count
    ) -> list[Group]:
        # Groups of answers from the data never enter, and a wave would wait forever for a sample that does not.
        sampled_numbers = [
            n for n, row in enumerate(rows, first_number) if not settings.is_demonstration(n, row.source)
        ]
        samples = [(number, sample) for number in sampled_numbers for sample in range(settings.answers)]
        if settings.failures is not None:
            settings.failures.expect(len(sampled_numbers) * settings.samples)
        requests: Requests = Waves(self.generator, self.main, samples, self.limit)
        if self.pool is not None:
            requests = SingleRequests(self.pool, self.places, settings.purpose != TRAINING)
        numbers_of_ended = itertools.count(1)

        def count_end() -> None:
            count(next(numbers_of_ended), len(samples))

        tasks = [
            asyncio.ensure_future(self.group(row, first_number + i, settings, requests, on_end=count_end))
            for i, row in enumerate(rows)
        ]
        try:
            return list(await asyncio.gather(*tasks))
        finally:  # after a failure, no task may continue in the background
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await requests.settled()

    async def group(
        self,
        row: Row,
        number: int,
        settings: RolloutSettings,
        requests: Requests,
        logs: Sequence[TurnLog] = (),
        on_end: Callable[[], None] = lambda: None,
    ) -> Group:
        """The scored group of ``row``, without its greedy answer.

        Args:
            logs: for each sample, the turns that were sampled for it before. They are not sampled again.
            on_end: called after each sample.
        """
        if settings.is_demonstration(number, row.source):
            return Group(row, number, [Trajectory(row, self.parts.template.encode_answer(row), (number, 0))])
        logs = logs or [TurnLog() for _ in range(settings.answers)]
        samples = [self._admitted(row, (number, s), settings, requests, log, on_end) for s, log in enumerate(logs)]
        group = Group(row, number, [*itertools.chain.from_iterable(await asyncio.gather(*samples))])
        if any(t.status != "failed" for t in group.trajectories):
            with self.timeline.slice("rewards", "rewards", group=number, purpose=settings.purpose):
                for samples_of_agent in group.by_agent().values():
                    await self.parts.scorer.score(samples_of_agent, settings.purpose == TRAINING)
        if settings.greedy:
            set_greedy_apart(group)
        # After scoring, because a reward or the greedy answer may fail a sample, too.
        failed = next((t for t in group.trajectories if t.status == "failed"), None)
        if failed is not None and settings.abort_on_failure:
            raise RolloutError(
                f"sample {describe(failed)}\n"
                'The run stops because stream.on_failed_sample is "abort"; "drop_sample" or "drop_group" lets it '
                "continue."
            )
        if settings.failures is not None:
            for trajectory in one_of_each_sample(group):
                settings.failures.add(trajectory)
        return group

    async def _admitted(
        self,
        row: Row,
        index: tuple[int, int],
        settings: RolloutSettings,
        requests: Requests,
        log: TurnLog,
        on_end: Callable[[], None],
    ) -> list[Trajectory]:
        """Make one sample once it is admitted. Returns the trajectory of each agent."""
        await requests.enter(index)
        try:
            arguments = {"group": index[0], "sample": index[1], "purpose": settings.purpose}
            with self.timeline.slice("samples", "sample", **arguments) as slice:
                trajectories = await self._sample(row, index, settings, requests, log, slice)
                tokens = sum(len(turn.ids) for _, _, turn in log.entries())
                slice.add(status=trajectories[0].status, tokens=tokens)
            if settings.purpose == TRAINING:
                self.sampled_tokens += log.added_tokens
            return trajectories
        finally:
            requests.leave()
            on_end()

    async def _sample(
        self,
        row: Row,
        index: tuple[int, int],
        settings: RolloutSettings,
        requests: Requests,
        log: TurnLog,
        slice: Slice,
    ) -> list[Trajectory]:
        if index[1] < settings.demonstrations_per_group:
            return [Trajectory(row, self.parts.template.encode_answer(row), index)]
        context = SampleContext(self.parts, index, settings, requests, log, slice)
        seed = derive_seed(settings.seed, f"{settings.purpose}/rollout", index[0])  # same task for the whole group
        label = f"rollout {self.parts.rollout.name!r}"
        trajectory, conversations = Trajectory(row, [], index), list[list[Turn]]()
        try:
            with boundary(RolloutError, label):
                async with context.clock.timeout:
                    turns = await self.parts.rollout.run(row, seed, context)
            agents = () if self.parts.episodes is None else self.parts.episodes.agents
            conversations = check_turns(turns, self.parts.experts, agents, self.parts.vocabulary)
            context.check_training(turns)
        except FATAL:
            raise
        except InvalidResult as error:
            trajectory.status, trajectory.error = "failed", f"RolloutError: {label} {error}"
        except RlhfError as error:
            # boundary() has turned the TimeoutError of the clock into a RolloutError.
            late = context.clock.timeout.expired()
            cause = f"took over stream.rollout_deadline = {settings.deadline} s outside generation" if late else error
            trajectory.status, trajectory.error = "failed", f"{type(error).__name__}: {cause}"
        finally:
            trajectory.info = context.numbers()
            try:
                await context.close()
            except RlhfError as error:
                trajectory.status, trajectory.error = "failed", trajectory.error or f"{type(error).__name__}: {error}"
        if trajectory.status == "failed" and settings.purpose == TRAINING and not conversations:
            # so that its tokens can be counted
            trajectory.turns = [replace(turn, agent="") for _, _, turn in log.entries()]
        trajectories = [replace(trajectory, turns=turns, info=dict(trajectory.info)) for turns in conversations]
        for part in trajectories:
            drop_repeated(part.turns)
            if part.status != "failed":
                part.status = "truncated" if part.truncated else "ok"
                if context.gives_rewards:
                    self.parts.scorer.add_up(part, settings.purpose == TRAINING)
        return trajectories or [trajectory]


@dataclass(frozen=True)
class Sampler:
    """Generates answers to rows with the newest weights of the policy, and scores the answers."""

    rollouts: Rollouts
    weights: WeightSync
    """Sends the policy's weights to the generator."""
    phases: Phases
    """Decides whether the generator or the roles use the devices that they share."""


def one_of_each_sample(group: Group) -> list[Trajectory]:
    """One trajectory of each sample, so that a sample of several agents counts once. A failed trajectory is
    preferred."""
    ordered = sorted(group.trajectories, key=lambda t: (t.index, t.status == "failed"))
    return list({t.index: t for t in ordered}.values())


def set_greedy_apart(group: Group) -> None:
    """Remove the last answer of a scored group, which is greedy, and note its reward in each of the others. If it has
    no reward, the samples that have a reward fail."""
    # It has one trajectory: a greedy answer is refused if the policy plays several agents (checks/sampling.py).
    greedy = group.trajectories.pop()
    for trajectory in group.trajectories:
        if greedy.status != "failed" and greedy.reward is not None:
            trajectory.info[GREEDY_REWARD] = greedy.reward
        elif trajectory.status != "failed" and trajectory.reward is not None:
            trajectory.status, trajectory.reward, trajectory.score = "failed", None, None
            cause = greedy.error or "no reward applied to it"
            trajectory.error = f"the greedy answer to the same prompt has no reward: {cause}"
