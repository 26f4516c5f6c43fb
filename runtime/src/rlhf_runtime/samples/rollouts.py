"""Turns data rows into scored groups: runs the rollout plugin once per sample, then the rewards once per group."""

from __future__ import annotations

import asyncio
import math
from array import array
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Protocol

from rlhf.errors import EnvError, ModelError, RlhfError, RolloutError, SyncError, TrainingError, WorkerError, boundary
from rlhf.interfaces import Env, Generator, Rollout, RolloutContext
from rlhf.requests import check_sampling
from rlhf.seeds import derive_seed
from rlhf.types import GenerationRequest, Group, Row, Sampling, Trajectory, Turn

from rlhf_runtime.models.shared_devices import Phases
from rlhf_runtime.observe.timeline import NO_TIMELINE, Slice, Timeline
from rlhf_runtime.samples.episodes import Episode
from rlhf_runtime.samples.failures import Failures, describe
from rlhf_runtime.samples.single_requests import SingleRequests
from rlhf_runtime.samples.turn_log import TurnLog
from rlhf_runtime.samples.waves import Waves
from rlhf_runtime.workers.main_thread import MainThread
from rlhf_runtime.workers.returned_values import InvalidResult, check_turns

FATAL = (WorkerError, SyncError, TrainingError, ModelError)
"""Errors of the generator or of its weights, not of one sample. They end the run whatever ``on_failed_sample`` says."""


TRAINING = "sample"
"""The purpose of samples that are trained on."""


Messages = Sequence[Mapping[str, Any]]


class PromptTemplate(Protocol):
    """How rows and observations become tokens (:class:`rlhf_runtime.data.template.Template`)."""

    @property
    def end_token_ids(self) -> tuple[int, ...]: ...

    @property
    def tokenizer(self) -> Any: ...

    def encode_prompt(self, row: Row) -> Turn: ...

    def encode_answer(self, row: Row) -> list[Turn]: ...

    def encode_opening(self, row: Row, text: str) -> list[Turn]: ...

    def encode_observation(self, text: str, closed: bool = True) -> Turn: ...

    def prompt_messages(self, row: Row) -> list[dict[str, Any]]: ...

    def encode_messages(self, messages: Messages, tools: Messages = ()) -> Turn: ...

    def encode_following(
        self,
        before: Messages,
        answer: Mapping[str, Any],
        following: Messages,
        tools: Messages = (),
        closed: bool = True,
    ) -> Turn | None: ...

    def parse_answer(self, turn: Turn, prompt: Sequence[int], key: object, tools: Messages = ()) -> dict[str, Any]: ...


class GroupScorer(Protocol):
    """How a group gets its rewards (:class:`rlhf_runtime.rewards.scoring.Scorer`)."""

    async def score(self, group: Group, trained_on: bool = True) -> object: ...


class Requests(Protocol):
    """How samples get their turns: in waves, or each by itself."""

    async def enter(self, order: tuple[int, ...]) -> None: ...

    async def generate(self, order: tuple[int, ...], request: GenerationRequest) -> Turn: ...

    def leave(self) -> None: ...

    async def settled(self) -> None: ...


@dataclass(frozen=True, slots=True)
class RolloutSettings:
    """Settings of a batch of rollouts. Training and evaluation have one object each."""

    sampling: Sampling
    samples: int
    purpose: str
    """Part of every seed: :data:`TRAINING`, or ``eval`` for evaluation."""
    seed: int
    max_tokens: int
    deadline: float
    """Seconds a sample may spend outside generation."""
    abort_on_failure: bool = True
    given: float = 0.0
    """Share of the rows whose group is the answer given in the data, not samples (``Needs.given``)."""
    failures: Failures | None = None
    """Counts failed samples when a failure does not abort the run, and stops the run when too many fail."""

    def gives(self, number: int) -> bool:
        """Whether group ``number`` holds the answer given in the data."""
        return self.given > 0 and derive_seed(self.seed, f"{self.purpose}/given", number) < self.given * 2.0**63


class Rollouts:
    """``run(rows, first_number, settings)`` returns one scored group per row, in order."""

    def __init__(
        self,
        rollout: Rollout,
        generator: Generator,
        template: PromptTemplate,
        scorer: GroupScorer,
        main: MainThread,
        open_env: Callable[[Slice], Env] | None = None,
        limit: int | None = None,
        phases: Phases | None = None,
        single_requests: bool = False,
        timeline: Timeline = NO_TIMELINE,
    ) -> None:
        self.rollout, self.generator, self.template = rollout, generator, template
        self.scorer, self.main, self.open_env = scorer, main, open_env
        self.phases = phases
        self.limit = min((n for n in (limit, rollout.concurrency) if n is not None), default=None)
        """Largest number of samples under way at once, if the environment or the rollout has such a limit."""
        self.single_requests = single_requests
        """Each sample is answered by itself, in place of waves."""
        self.timeline = timeline

    def run(self, rows: Sequence[Row], first_number: int, settings: RolloutSettings) -> list[Group]:
        """Blocks until every group is complete and scored. A failed sample raises if ``settings.abort_on_failure``;
        otherwise it is returned with status ``failed``."""
        with self.phases.generating() if self.phases is not None else nullcontext():
            return self.main.run(self._groups(rows, first_number, settings))

    async def _groups(self, rows: Sequence[Row], first_number: int, settings: RolloutSettings) -> list[Group]:
        numbers = range(first_number, first_number + len(rows))
        drawn = [number for number in numbers if not settings.gives(number)]
        samples = [(number, sample) for number in drawn for sample in range(settings.samples)]
        if settings.failures is not None:
            settings.failures.expect(len(samples))
        requests: Requests = Waves(self.generator, self.main, samples, self.limit)
        if self.single_requests:
            requests = SingleRequests(self.generator, self.limit)
        tasks = [
            asyncio.ensure_future(self.group(row, first_number + i, settings, requests)) for i, row in enumerate(rows)
        ]
        try:
            return list(await asyncio.gather(*tasks))
        finally:  # after a failure, no task may go on in the background
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await requests.settled()

    async def group(
        self, row: Row, number: int, settings: RolloutSettings, requests: Requests, logs: Sequence[TurnLog] = ()
    ) -> Group:
        """The scored group of ``row``.

        Args:
            logs: of each sample the turns that were sampled for it before. They are not sampled again.
        """
        if settings.gives(number):
            return Group(row, number, [Trajectory(row, self.template.encode_answer(row), (number, 0))])
        logs = logs or [TurnLog() for _ in range(settings.samples)]
        samples = [self._admitted(row, (number, s), settings, requests, log) for s, log in enumerate(logs)]
        group = Group(row, number, list(await asyncio.gather(*samples)))
        if any(t.status != "failed" for t in group.trajectories):
            with self.timeline.slice("rewards", "rewards", group=number, purpose=settings.purpose):
                await self.scorer.score(group, settings.purpose == TRAINING)
        failed = next((t for t in group.trajectories if t.status == "failed"), None)
        if failed is not None and settings.abort_on_failure:
            raise RolloutError(
                f"sample {describe(failed)}\n"
                'The run stops because stream.on_failed_sample is "abort"; "drop_sample" or "drop_group" lets it go on.'
            )
        if settings.failures is not None:
            for trajectory in group.trajectories:
                settings.failures.add(trajectory)
        return group

    async def _admitted(
        self, row: Row, index: tuple[int, int], settings: RolloutSettings, requests: Requests, log: TurnLog
    ) -> Trajectory:
        """A sample, once it may begin."""
        await requests.enter(index)
        try:
            about = {"group": index[0], "sample": index[1], "purpose": settings.purpose}
            with self.timeline.slice("samples", "sample", **about) as slice:
                trajectory = await self._sample(row, index, settings, requests, log, slice)
                slice.add(status=trajectory.status, tokens=trajectory.sampled_tokens)
            return trajectory
        finally:
            requests.leave()

    async def _sample(
        self,
        row: Row,
        index: tuple[int, int],
        settings: RolloutSettings,
        requests: Requests,
        log: TurnLog,
        slice: Slice,
    ) -> Trajectory:
        context = _Context(self, row, index, settings, requests, log, slice)
        seed = derive_seed(settings.seed, f"{settings.purpose}/rollout", index[0])  # same task for the whole group
        what = f"rollout {self.rollout.name!r}"
        trajectory = Trajectory(row, [], index)
        try:
            with boundary(RolloutError, what):
                async with asyncio.timeout(settings.deadline) as context.clock:
                    turns = await self.rollout.run(row, seed, context)
            trajectory.turns = check_turns(turns)
            trajectory.status = "truncated" if trajectory.truncated else "ok"
        except FATAL:
            raise
        except InvalidResult as error:
            trajectory.status, trajectory.error = "failed", f"RolloutError: {what} {error}"
        except RlhfError as error:
            late = context.clock is not None and context.clock.expired()
            cause = f"took over stream.rollout_deadline = {settings.deadline} s outside generation" if late else error
            trajectory.status, trajectory.error = "failed", f"{type(error).__name__}: {cause}"
        finally:
            trajectory.info = context.numbers()
            try:
                await context.close()
            except RlhfError as error:
                trajectory.status, trajectory.error = "failed", trajectory.error or f"{type(error).__name__}: {error}"
        if trajectory.status == "failed" and not trajectory.turns and settings.purpose == TRAINING:
            trajectory.turns = [turn for _, _, turn in log.entries()]  # so that its tokens can be counted
        return trajectory


class _Context(RolloutContext):
    """One sample's view of the run."""

    def __init__(
        self,
        run: Rollouts,
        row: Row,
        index: tuple[int, int],
        settings: RolloutSettings,
        requests: Requests,
        log: TurnLog,
        slice: Slice,
    ) -> None:
        self._run, self._row, self._index, self._settings, self._requests = run, row, index, settings, requests
        self._log, self._slice = log, slice
        self._envs: list[Env] = []
        self._reported: dict[str, float] = {}
        self._closed, self._generating = True, False
        self._answers: dict[int, tuple[int, Turn, Turn]] = {}
        """{id of a sampled turn: (its number, the turn before it, the turn itself)}"""
        self.clock: asyncio.Timeout | None = None
        self.index, self.sampling, self.max_tokens = index, settings.sampling, settings.max_tokens

    @property
    def tokenizer(self) -> Any:
        return self._run.template.tokenizer

    def encode_prompt(self, row: Row) -> Turn:
        return self._run.template.encode_prompt(row)

    def encode_opening(self, row: Row, text: str) -> list[Turn]:
        return self._run.template.encode_opening(row, text)

    def encode_observation(self, text: str) -> Turn:
        """Also closes the answer before it, if that answer was cut off before its end token."""
        return self._run.template.encode_observation(text, self._closed)

    def prompt_messages(self, row: Row) -> list[dict[str, Any]]:
        return self._run.template.prompt_messages(row)

    def encode_messages(self, messages: Messages, tools: Messages = ()) -> Turn:
        return self._run.template.encode_messages(messages, tools)

    def encode_following(
        self,
        before: Messages,
        answer: Mapping[str, Any],
        following: Messages,
        tools: Messages = (),
        turn: Turn | None = None,
    ) -> Turn | None:
        closed = self._closed if turn is None else self._ended(turn)
        return self._run.template.encode_following(before, answer, following, tools, closed)

    def parse_answer(self, turn: Turn, tools: Messages = ()) -> dict[str, Any]:
        number, prompt, _ = self._answers.get(id(turn), (0, None, None))
        if prompt is None:
            raise RolloutError("parse_answer() takes a turn that generate() of the same sample returned")
        return self._run.template.parse_answer(turn, prompt.ids, (*self._index, number), tools)

    def _ended(self, turn: Turn) -> bool:
        return bool(turn.ids) and turn.ids[-1] in self._run.template.end_token_ids

    async def generate(self, turns: list[Turn], sampling: Sampling, turn_number: int = 0) -> Turn:
        if self._generating:
            raise RolloutError(
                "the rollout asks for a turn while another turn of the same sample is being generated; await the first "
                "turn before asking for the next"
            )
        check_sampling(sampling)  # checked here so that only this sample fails, not the other samples of its wave
        if self._settings.purpose == TRAINING:
            _check_distribution(sampling, self.sampling)
        start = max((i for i, t in enumerate(turns) if t.fresh), default=0)
        ids = turns[start].ids if start == len(turns) - 1 else array("i", b"".join(t.ids for t in turns[start:]))
        if len(ids) >= self.max_tokens:
            raise RolloutError(
                f"{len(ids)} tokens of context leave no room to answer within data.max_tokens = {self.max_tokens}"
            )
        room = min(sampling.max_new_tokens, self.max_tokens - len(ids))
        sampling = _with_budget(sampling, room)
        seed = derive_seed(self._settings.seed, self._settings.purpose, *self._index, turn_number)
        request = GenerationRequest(ids, seed, sampling)
        turn = self._log.find(turn_number, request)
        if turn is None:
            turn = await self._generate(turn_number, request)
            self._log.add(turn_number, request, turn)
        self._closed = self._ended(turn)
        self._answers[id(turn)] = turn_number, turns[-1], turn
        return turn

    async def _generate(self, turn_number: int, request: GenerationRequest) -> Turn:
        remaining, self._generating = self._stop_clock(), True
        try:
            about = {"group": self._index[0], "sample": self._index[1], "turn": turn_number}
            with self._slice.child("turn", context=len(request.ids), **about) as slice:
                turn = await self._requests.generate((*self._index, turn_number), request)
                slice.add(tokens=len(turn.ids), versions=[version for _, version in turn.versions])
            return turn
        finally:
            self._generating = False
            self._start_clock(remaining)

    def _stop_clock(self) -> float:
        """Stop the sample's deadline during generation, which waits for other samples."""
        end = self.clock.when() if self.clock is not None else None
        if self.clock is None or end is None:
            return self._settings.deadline
        self.clock.reschedule(None)
        return end - asyncio.get_running_loop().time()

    def _start_clock(self, seconds: float) -> None:
        if self.clock is not None:
            self.clock.reschedule(asyncio.get_running_loop().time() + seconds)

    def report(self, name: str, value: float) -> None:
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise RolloutError(f"the rollout reports {value!r:.60} as {name!r}; allowed: a finite number")
        self._reported[name] = float(value)

    def numbers(self) -> dict[str, float]:
        """What the rollout and the environments said about the sample in numbers."""
        episodes = [env for env in self._envs if isinstance(env, Episode)]
        of_envs = {f"env/{key}": value for env in episodes for key, value in env.numbers.items()}
        of_rollout = {f"rollout/{name}": value for name, value in self._reported.items()}
        return dict(sorted({**of_envs, **of_rollout}.items()))

    async def open_env(self) -> Env:
        if self._run.open_env is None:
            raise RolloutError(f"rollout {self._run.rollout.name!r} opens an environment; set [env] use = ...")
        env = self._run.open_env(self._slice)
        self._envs.append(env)
        return env

    async def close(self) -> None:
        """Close every environment, even if closing another one raises."""
        async with AsyncExitStack() as closing:
            for env in reversed(self._envs):
                closing.push_async_callback(_close, env)


async def _close(env: Env) -> None:
    with boundary(EnvError, f"close() of environment {env.name!r}"):
        closing = env.close()
        if closing is not None:
            await closing


def _check_distribution(asked: Sampling, run: Sampling) -> None:
    """Training samples must be drawn from the distribution whose log-probs are trained on. Truncation (top_p, top_k,
    min_p) may only be off, or as the run file says, which the run's checks have accepted."""
    for field, off in (("top_p", 1.0), ("top_k", 0), ("min_p", 0.0)):
        if getattr(asked, field) not in (off, getattr(run, field)):
            raise RolloutError(
                f"a turn is asked for with {field} = {getattr(asked, field)}, but [sampling] has {field} = "
                f"{getattr(run, field)}. Training would treat the turn as if all tokens had been allowed. A rollout or "
                "an environment may change max_new_tokens, temperature and stop"
            )
    if not asked.temperature > 0:
        raise RolloutError(
            f"a turn is asked for at temperature {asked.temperature}. Greedy decoding draws nothing at random, so the "
            "turn has no log-probs to train on. Give a temperature above 0"
        )


def _with_budget(sampling: Sampling, max_new_tokens: int) -> Sampling:
    return replace(sampling, max_new_tokens=max_new_tokens)
