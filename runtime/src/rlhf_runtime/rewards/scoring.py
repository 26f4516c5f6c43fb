"""Scores groups: calls every reward source within its deadline, checks the results and adds them up.

For a trajectory with reward sources k (weights w_k) that returned a result for it::

    reward = sum_k w_k (value_k + sum of steps_k, if credit_k is "outcome")
             + sum of the environment's turn rewards, if its credit is "outcome"
    score  = sum_k w_k (score_k, if returned, else value_k + sum of all steps_k)
             + the last turn score of the environment, else the sum of its turn rewards

``value`` and ``steps`` of one source are added, so a source whose value already is the sum of its steps must leave one
of the two out. With ``credit = "step"`` the steps are not part of ``reward``: they are placed at their tokens (times
the weight) when the batch is assembled, so they count once in either case. The same holds for the environment's turn
rewards, except in evaluation: no batch is assembled there, so they are part of ``reward``.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from rlhf.control_groups import usable_cores
from rlhf.errors import ConfigError, RewardError, RlhfError, boundary
from rlhf.interfaces import Component, ComponentConfig, ReadRole, Reward, RewardContext, ScoreWithRole
from rlhf.interfaces.tokens import Tokens
from rlhf.plugins import Resolved
from rlhf.plugins.resolved import IN_PROCESS
from rlhf.types import Group, RewardResult, Trajectory

from rlhf_runtime.calls.deadlines import DeadlineExpired, cause, with_deadline
from rlhf_runtime.calls.isolation import check_python
from rlhf_runtime.calls.plugin_worker import PluginWorker, WorkerPool, reference
from rlhf_runtime.calls.returned_values import InvalidResult, check_results, results_from_json

CALLS = 64
"""Default number of concurrent calls of an ``async def`` reward. The number of threads for blocking calls is the same
(:mod:`rlhf_runtime.calls.main_thread`)."""


@dataclass(frozen=True, slots=True)
class ActiveReward:
    """One ``[[reward]]`` section, resolved.

    Raises ConfigError for a plain ``def score`` that needs models or keeps state, and for a teacher with options of a
    reward. Raises RewardError for a plain ``def score`` that cannot be copied to its worker processes.
    """

    name: str
    """Name of this source in the run; two sources may use one plugin."""
    resolved: Resolved
    instance: Reward
    config: ComponentConfig | None = None
    weight: float = 1.0
    deadline: float = 60.0
    """Seconds for one call of ``score``."""
    retries: int = 0
    """Number of further attempts after a call that raised, exceeded its deadline or returned an invalid result."""
    credit: Literal["outcome", "step"] = "outcome"
    concurrency: int | None = None
    """Maximum concurrent calls of ``score``; None: :attr:`Reward.concurrency`, else :data:`CALLS`, or the default
    number of workers for a plain ``def``."""
    sources: tuple[str, ...] = ()
    """Sources of the rows that it scores; empty: all."""
    python: str | None = None
    """Program that runs its worker processes; None: the Python of this process."""

    def __post_init__(self) -> None:
        if self.instance.is_teacher and (self.weight, self.credit) != (1.0, "outcome"):
            raise ConfigError(
                f"{self} gives log-probs of a teacher and no reward, so weight = {self.weight:g} and credit = "
                f"{self.credit!r} would have no effect; remove them"
            )
        if self.python is not None:
            check_python(self.resolved, self.python, self.in_worker)
        if not self.in_worker:
            return
        if self.instance.roles():
            raise ConfigError(
                f"{self} declares roles but its score() is plain `def`, which runs in a worker process without models; "
                "write `async def score`"
            )
        if self.resolved.cls.state_dict is not Component.state_dict:
            raise ConfigError(
                f"{self} keeps state but its score() is plain `def`, which runs in several worker processes that do "
                "not share it; write `async def score`"
            )
        if self.resolved.distribution == IN_PROCESS:
            reference(self.resolved, RewardError)

    def __str__(self) -> str:
        return f"reward {self.name!r} ({f'{self.resolved.distribution} {self.resolved.version}'.strip()})"

    def calls(self, default: int) -> int:
        """Maximum concurrent calls of ``score``."""
        return self.concurrency or self.instance.concurrency or default

    @property
    def in_worker(self) -> bool:
        """Whether ``score`` is plain ``def`` and so runs in worker processes."""
        return not inspect.iscoroutinefunction(self.resolved.cls.score)


@dataclass(frozen=True, slots=True)
class RewardCall:
    """One call of a reward's ``score``."""

    reward: str
    group: Group
    """The samples of the call: all samples of a prompt, or one sample."""
    seconds: float
    """From the start of the call to its result, its failure or its deadline. Waiting for a free call does not count."""
    results: list[RewardResult | str]
    """A result or error text for each sample."""


class Scorer:
    """Call ``setup`` once, ``score`` for each group (any number concurrently) and ``close`` at the end.

    Raises ConfigError if two sources have the same name.
    """

    def __init__(
        self,
        rewards: Sequence[ActiveReward],
        *,
        score_with_role: ScoreWithRole | None = None,
        read_role: ReadRole | None = None,
        tokens: Tokens | None = None,
        seed: int = 0,
        workers: int | None = None,
        turn_credit: Literal["outcome", "step"] = "outcome",
    ) -> None:
        self.rewards = tuple(rewards)
        self._score_with_role, self._read_role, self._tokens, self._seed = score_with_role, read_role, tokens, seed
        self._turn_credit = turn_credit
        self.calls: list[RewardCall] | None = None
        """The recorded calls; None: calls are not recorded."""
        size = workers or min(4, usable_cores())
        names = [r.name for r in rewards]
        if repeated := sorted({n for n in names if names.count(n) > 1}):
            raise ConfigError(f"two rewards are called {repeated[0]!r}; give each [[reward]] section its own `name`")
        if "env" in names:
            raise ConfigError(
                "a reward cannot be called 'env': the environment's own rewards use this name; set `name`"
            )
        self._pools = {
            r.name: WorkerPool(
                partial(PluginWorker, r.resolved, r.config, RewardError, str(r), r.python), r.calls(size)
            )
            for r in rewards
            if r.in_worker
        }
        self._turns = {r.name: asyncio.Semaphore(r.calls(CALLS)) for r in rewards if not r.in_worker}

    async def setup(self) -> None:
        """Set up every reward, and start a worker of each reward that needs one. A reward that cannot start stops the
        run here, before anything is generated."""
        for reward in self.rewards:
            ask = (self._score_with_role, self._read_role) if reward.instance.roles() else (None, None)
            context = RewardContext(ask[0], self._seed, ask[1], self._tokens, reward.credit)
            with boundary(RewardError, f"{reward}: setup()"):
                await reward.instance.setup(context)
        await asyncio.gather(*(self._start(pool) for pool in self._pools.values()))

    async def score(self, group: Group, trained_on: bool = True) -> None:
        """Fill ``rewards``, ``reward`` and ``score`` of every trajectory that has not failed already. If its rollout
        gave a trajectory a reward, only teachers read it.

        Args:
            trained_on: whether a batch will be assembled from the group, which places step rewards at their tokens.

        If a source fails on a trajectory, the trajectory gets ``status = "failed"`` and ``error``, but no reward and no
        score. The caller decides what to do with it. A source that raises, exceeds its deadline or returns a wrong
        number of results fails on all trajectories of that call: the whole group, or one trajectory
        (``Reward.per_sample``).
        """
        live = [t for t in group.trajectories if t.status != "failed"]
        sources = [reward for reward in self.rewards if trained_on or not reward.instance.is_teacher]
        teachers = [reward for reward in sources if reward.instance.is_teacher]
        rest, complete = [t for t in live if t.reward is None], [t for t in live if t.reward is not None]
        await self._score(replace(group, trajectories=rest), sources, trained_on)
        await self._score(replace(group, trajectories=complete), teachers, trained_on)

    async def _score(self, group: Group, sources: Sequence[ActiveReward], trained_on: bool) -> None:
        if not group.trajectories:
            return
        answers = await asyncio.gather(*(self._ask(reward, group) for reward in sources))
        for i, trajectory in enumerate(group.trajectories):
            results = {r.name: answer[i] for r, answer in zip(sources, answers, strict=True)}
            trajectory.rewards = {name: r for name, r in results.items() if isinstance(r, RewardResult)}
            errors = [e for e in results.values() if isinstance(e, str)]
            if errors:
                trajectory.status, trajectory.error = "failed", errors[0]
                trajectory.reward = trajectory.score = None
                continue
            self.add_up(trajectory, trained_on)

    def add_up(self, trajectory: Trajectory, trained_on: bool) -> None:
        """Fill ``reward`` and ``score`` from the results of the sources, if there are any, and the rewards of turns."""
        turns_placed = trained_on and self._turn_credit == "step"
        trajectory.reward, trajectory.score = combine(self.rewards, trajectory, turns_placed=turns_placed)

    def close(self) -> None:
        """End the worker processes."""
        for pool in self._pools.values():
            pool.close()

    async def _ask(self, reward: ActiveReward, group: Group) -> list[RewardResult | str]:
        """One result or error text per trajectory. A source that does not score these rows gives results without a
        value."""
        if reward.sources and group.row.source not in reward.sources:
            return [RewardResult(None) for _ in group.trajectories]
        if not reward.instance.per_sample:
            return await self._call(reward, group)
        singles = [replace(group, trajectories=[t]) for t in group.trajectories]
        return [result for (result,) in await asyncio.gather(*(self._call(reward, single) for single in singles))]

    async def _call(self, reward: ActiveReward, group: Group) -> list[RewardResult | str]:
        """One result or error text per trajectory, after at most ``retries`` further attempts. The texts do not name
        the sample, because messages about failed samples already name it."""
        results: list[RewardResult | str] = []
        for _ in range(1 + reward.retries):
            clock = _Clock()
            try:
                results = [
                    r if isinstance(r, RewardResult) else f"RewardError: {reward}: score() {r}"
                    for r in await self._attempt(reward, group, clock)
                ]
            except RlhfError as error:
                results = [f"{type(error).__name__}: {error}"] * len(group.trajectories)
            if self.calls is not None:
                self.calls.append(RewardCall(reward.name, group, clock.seconds, results))
            # An attempt counts as a whole. After one failed sample, all samples of the call are scored again.
            if all(isinstance(r, RewardResult) for r in results):
                return results
        if reward.retries:
            attempts = f" (attempt {1 + reward.retries} of {1 + reward.retries})"
            return [r + attempts if isinstance(r, str) else r for r in results]
        return results

    async def _attempt(self, reward: ActiveReward, group: Group, clock: _Clock) -> list[RewardResult | str]:
        if reward.in_worker:
            with boundary(RewardError, f"{reward}: asking its worker process"):  # an unpicklable row, a failed start
                async with self._pools[reward.name].worker() as worker:
                    with clock:
                        answer = await worker.call("score", group, deadline=reward.deadline)
            try:
                return results_from_json(answer, group.trajectories)
            except InvalidResult as error:
                raise RewardError(f"{reward}: score() {error}") from None
        # Other rewards score the group at the same time: none must see a list that this one has sorted.
        copy = replace(group, trajectories=[*group.trajectories])
        try:
            async with self._turns[reward.name]:
                with clock:
                    scoring: Any = reward.instance.score(copy)
                    results = await with_deadline(scoring, reward.deadline)
                return check_results(results, group.trajectories, copy.trajectories)
        except DeadlineExpired:
            raise RewardError(
                f"{reward}: score() took longer than its deadline of {reward.deadline:g} s and was cancelled. "
                "Make it faster or raise `deadline` in its section."
            ) from None
        except InvalidResult as error:
            raise RewardError(f"{reward}: score() {error}") from None
        except Exception as error:
            raise RewardError(f"{reward}: score() raised {cause(error)}") from error

    async def _start(self, pool: WorkerPool) -> None:
        async with pool.worker():
            pass


class _Clock:
    """Measures the time in its context."""

    seconds = 0.0

    def __enter__(self) -> None:
        self._begin = time.monotonic()

    def __exit__(self, *_: object) -> None:
        self.seconds = time.monotonic() - self._begin


def combine(
    rewards: Sequence[ActiveReward], trajectory: Trajectory, turns_placed: bool = False, steps_placed: bool = True
) -> tuple[float | None, float | None]:
    """(reward, score) of a trajectory from the results of its sources and its environment, by the formulas of this
    module. (None, None) if there is no result.

    Args:
        turns_placed: whether the environment's turn rewards are placed at their tokens elsewhere.
        steps_placed: whether the steps of sources with ``credit = "step"`` are placed at their tokens elsewhere, or are
            read from ``score``.

    Each sum is rounded once, so that 0.7 + 0.2 + 0.1 of three sources is exactly 1 for thresholds and filters.
    """
    rewards_given: list[float] = []
    scores_given: list[float] = []
    for source in rewards:
        result = trajectory.rewards.get(source.name)
        if result is None or source.instance.is_teacher or (result.value is None and not result.steps):
            continue
        steps, value = math.fsum(v for _, _, v in result.steps), result.value or 0.0
        is_placed = steps_placed and source.credit == "step"
        rewards_given.append(source.weight * (value + (0.0 if is_placed else steps)))
        scores_given.append(source.weight * (value + steps if result.score is None else result.score))
    turns = [t.reward for t in trajectory.turns if t.sampled and t.reward is not None]
    if not rewards_given and not turns:
        return None, None
    turn_scores = [t.score for t in trajectory.turns if t.sampled and t.score is not None]
    score = math.fsum(scores_given + (turn_scores[-1:] or turns))
    return math.fsum(rewards_given + ([] if turns_placed else turns)), score
