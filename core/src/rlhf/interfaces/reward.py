"""Rewards: score the trajectories of a group."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from typing import Protocol

from rlhf.interfaces.component import Component
from rlhf.types import Group, RewardResult, RoleSpec


class ScoreWithRole(Protocol):
    """``await score(role, texts or token lists) -> values``: a reward model held by the run."""

    def __call__(self, role: str, ids: Sequence[Sequence[int]], /) -> Awaitable[list[float]]: ...


@dataclass(frozen=True, slots=True)
class RewardContext:
    """What a reward gets before the run starts."""

    score_with_role: ScoreWithRole | None = None
    """Runs a role this reward declared; None where the reward declared none."""
    seed: int = 0


class Reward(Component):
    """``score`` may be ``async def`` (runs on the event loop, cancelled at its deadline) or plain ``def`` (runs
    in a worker process that is killed at its deadline; then the instance is built again in the worker from its
    reference and config). Complete example::

        class Brevity(Reward):
            name = "brevity"

            async def score(self, group):
                return [RewardResult(-float(len(t.answer))) for t in group.trajectories]
    """

    def roles(self) -> tuple[RoleSpec, ...]:
        """Models this reward needs; placed, loaded and put to sleep by the run like any other role."""
        return ()

    async def setup(self, context: RewardContext) -> None:
        """Once, before the first group. Not called in worker processes."""

    @abstractmethod
    def score(self, group: Group) -> list[RewardResult] | Awaitable[list[RewardResult]]:
        """One result per trajectory, in order. The whole data row is ``group.row``; the group's siblings are
        visible. Another number of results, a non-number or NaN is refused, never broadcast."""
