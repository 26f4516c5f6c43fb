"""Scores groups: calls every reward source within its deadline, checks what it returns, adds it up.

For a trajectory with sources k (weights w_k) that said something about it::

    reward = sum_k w_k (value_k + sum of steps_k, where credit_k is "outcome")
             + sum of the environment's turn rewards, where its credit is "outcome"
    score  = sum_k w_k (score_k, where given, else value_k + sum of all steps_k) + sum of the environment's turn rewards

``value`` and ``steps`` of one source are different parts of what it gives: a source whose value already is the sum of
its steps must leave one of the two out. With ``credit = "step"`` the steps are left out of ``reward``, because they are
placed at their tokens (times the weight) when the batch is assembled: they count once either way. So it is with the
environment's; in evaluation no batch is assembled, and they are in ``reward``.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from rlhf.errors import ConfigError, RewardError, RlhfError, boundary
from rlhf.interfaces import Component, ComponentConfig, ReadRole, Reward, RewardContext, ScoreWithRole
from rlhf.interfaces.tokens import Tokens
from rlhf.plugins import Resolved
from rlhf.types import Group, RewardResult, Trajectory

from rlhf_runtime.workers.deadlines import DeadlineExpired, cause, within
from rlhf_runtime.workers.returned_values import InvalidResult, check_results, results_from_json
from rlhf_runtime.workers.worker_pool import WorkerPool

CALLS = 64
"""Calls of an ``async def`` reward under way at once by default. Threads in which one waits are as many
(:mod:`rlhf_runtime.workers.blocking_calls`)."""


@dataclass(frozen=True, slots=True)
class ActiveReward:
    """One ``[[reward]]`` section, resolved."""

    name: str
    """Of this source in the run; two sources may use one plugin."""
    resolved: Resolved
    instance: Reward
    config: ComponentConfig | None = None
    weight: float = 1.0
    deadline: float = 60.0
    """Seconds for one call of ``score``."""
    retries: int = 0
    """Further attempts after one that raised, expired, or returned something invalid."""
    credit: Literal["outcome", "step"] = "outcome"
    concurrency: int | None = None
    """Calls of ``score`` at once; None: as many as :data:`CALLS`, or as there are workers by default."""

    def __str__(self) -> str:
        return f"reward {self.name!r} ({f'{self.resolved.distribution} {self.resolved.version}'.strip()})"

    @property
    def in_worker(self) -> bool:
        """Whether ``score`` is plain ``def`` and so runs in worker processes."""
        return not inspect.iscoroutinefunction(self.resolved.cls.score)


@dataclass(slots=True)
class ScoreCounts:
    """What happened over one or more groups."""

    failed: int = 0
    """Trajectories that failed in scoring."""
    retried: int = 0
    """Attempts that were repeated."""
    not_applicable: int = 0
    """Trajectories about which no source and no environment said anything."""


class Scorer:
    """``setup`` once, ``score`` per group (any number at once), ``close`` at the end.

    Raises ConfigError: two sources of one name; a reward that cannot run where its ``score`` would.
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
        self.rewards, self.counts = tuple(rewards), ScoreCounts()
        self._score_with_role, self._read_role, self._tokens, self._seed = score_with_role, read_role, tokens, seed
        self._turn_credit = turn_credit
        size = workers or min(4, os.cpu_count() or 1)
        names = [r.name for r in rewards]
        if repeated := sorted({n for n in names if names.count(n) > 1}):
            raise ConfigError(f"two rewards are called {repeated[0]!r}; give each [[reward]] section its own `name`")
        if "env" in names:
            raise ConfigError("a reward cannot be called 'env': that names the environment's own rewards; set `name`")
        for reward in rewards:
            _check_place(reward)
        self._pools = {
            r.name: WorkerPool(r.resolved, r.config, RewardError, r.concurrency or size, str(r))
            for r in rewards
            if r.in_worker
        }
        self._turns = {r.name: asyncio.Semaphore(r.concurrency or CALLS) for r in rewards if not r.in_worker}

    async def setup(self) -> None:
        """Set every reward up and start a worker of each that needs one, so that one which cannot start stops the run
        before anything is generated."""
        for reward in self.rewards:
            ask = (self._score_with_role, self._read_role) if reward.instance.roles() else (None, None)
            context = RewardContext(ask[0], self._seed, ask[1], self._tokens, reward.credit)
            with boundary(RewardError, f"{reward}: setup()"):
                await reward.instance.setup(context)
        await asyncio.gather(*(self._start(pool) for pool in self._pools.values()))

    async def score(self, group: Group, trained_on: bool = True) -> ScoreCounts:
        """Fill ``rewards``, ``reward`` and ``score`` of every trajectory that has not failed already.

        Args:
            trained_on: whether a batch is assembled of the group, which places step rewards.

        A trajectory that a source fails on gets ``status = "failed"`` and ``error``, and neither reward nor score: what
        becomes of it is the caller's policy. A source that raises, expires or returns another number of results
        fails on all trajectories that it was asked about in that call: the group, or one (``Reward.per_sample``).
        """
        live = [t for t in group.trajectories if t.status != "failed"]
        if not live:
            return ScoreCounts()
        counts = ScoreCounts()
        asked = replace(group, trajectories=live)
        answers = await asyncio.gather(*(self._ask(reward, asked, counts) for reward in self.rewards))
        for i, trajectory in enumerate(live):
            given = {r.name: answer[i] for r, answer in zip(self.rewards, answers, strict=True)}
            trajectory.rewards = {name: r for name, r in given.items() if isinstance(r, RewardResult)}
            errors = [e for e in given.values() if isinstance(e, str)]
            if errors:
                trajectory.status, trajectory.error = "failed", errors[0]
                counts.failed += 1
                continue
            placed = trained_on and self._turn_credit == "step"
            trajectory.reward, trajectory.score = combine(self.rewards, trajectory, turns_placed=placed)
            counts.not_applicable += trajectory.reward is None
        self.counts.failed += counts.failed
        self.counts.retried += counts.retried
        self.counts.not_applicable += counts.not_applicable
        return counts

    def close(self) -> None:
        """End the worker processes."""
        for pool in self._pools.values():
            pool.close()

    async def _ask(self, reward: ActiveReward, group: Group, counts: ScoreCounts) -> list[RewardResult | str]:
        """One result or error text per trajectory."""
        if not reward.instance.per_sample:
            return await self._call(reward, group, counts)
        alone = [replace(group, trajectories=[t]) for t in group.trajectories]
        return [result for (result,) in await asyncio.gather(*(self._call(reward, one, counts) for one in alone))]

    async def _call(self, reward: ActiveReward, group: Group, counts: ScoreCounts) -> list[RewardResult | str]:
        """One result or error text per trajectory, after at most ``retries`` further attempts."""
        results: list[RewardResult | str] = []
        for attempt in range(1 + reward.retries):
            counts.retried += attempt > 0
            try:
                results = [
                    r if isinstance(r, RewardResult) else f"RewardError: {reward}: score() {r}, {_where(group, t)}"
                    for r, t in zip(await self._attempt(reward, group), group.trajectories, strict=True)
                ]
            except RlhfError as error:
                only = group.trajectories[0] if reward.instance.per_sample else None
                message = f"{type(error).__name__}: {error}, {_where(group, only)}"
                results = [message] * len(group.trajectories)
            if all(isinstance(r, RewardResult) for r in results):
                return results
        if reward.retries:
            tried = f" (attempt {1 + reward.retries} of {1 + reward.retries})"
            return [r + tried if isinstance(r, str) else r for r in results]
        return results

    async def _attempt(self, reward: ActiveReward, group: Group) -> list[RewardResult | str]:
        if reward.in_worker:
            with boundary(RewardError, f"{reward}: asking its worker process"):  # a row that cannot be sent, no process
                async with self._pools[reward.name].worker() as worker:
                    answer = await worker.call("score", group, deadline=reward.deadline)
            try:
                return results_from_json(answer, group.trajectories)
            except InvalidResult as error:
                raise RewardError(f"{reward}: score() {error}") from None
        try:
            async with self._turns[reward.name]:
                scoring: Any = reward.instance.score(group)
                return check_results(await within(scoring, reward.deadline), group.trajectories)
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


def combine(
    rewards: Sequence[ActiveReward], trajectory: Trajectory, turns_placed: bool = False
) -> tuple[float | None, float | None]:
    """(reward, score) of a trajectory from what its sources and its environment gave, as the module says. (None, None)
    where nothing was given: that is no zero.

    Args:
        turns_placed: the environment's turn rewards are placed at their tokens elsewhere.

    Each sum is rounded once: 0.7 + 0.2 + 0.1 of three sources is 1, what thresholds and filters compare with.
    """
    rewards_given: list[float] = []
    scores_given: list[float] = []
    for source in rewards:
        result = trajectory.rewards.get(source.name)
        if result is None or (result.value is None and not result.steps):
            continue
        steps, value = math.fsum(v for _, _, v in result.steps), result.value or 0.0
        rewards_given.append(source.weight * (value + (steps if source.credit == "outcome" else 0.0)))
        scores_given.append(source.weight * (value + steps if result.score is None else result.score))
    turns = [t.reward for t in trajectory.turns if t.sampled and t.reward is not None]
    if not rewards_given and not turns:
        return None, None
    return math.fsum(rewards_given + ([] if turns_placed else turns)), math.fsum(scores_given + turns)


def _check_place(reward: ActiveReward) -> None:
    if not reward.in_worker:
        return
    cls = reward.resolved.cls
    if reward.instance.roles():
        raise ConfigError(
            f"{reward} declares roles but its score() is plain `def`, which runs in a worker process without models; "
            "write `async def score`"
        )
    if cls.state_dict is not Component.state_dict:
        raise ConfigError(
            f"{reward} keeps state but its score() is plain `def`, which runs in several worker processes that do not "
            "share it; write `async def score`"
        )


def _where(group: Group, trajectory: Trajectory | None = None) -> str:
    row = f"row {group.row.index} of source {group.row.source!r}"
    return row if trajectory is None else f"sample {trajectory.index[1]} of {row}"
