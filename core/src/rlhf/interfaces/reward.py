"""Rewards: score the trajectories of a group."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from rlhf.interfaces.component import Component
from rlhf.interfaces.tokens import Tokens
from rlhf.types import Group, Head, RewardResult, RoleSpec


class ScoreWithRole(Protocol):
    """``await score(role, texts or token lists) -> values``: a reward model held by the run."""

    def __call__(self, role: str, ids: Sequence[Sequence[int]], /) -> Awaitable[list[float]]: ...


class ReadRole(Protocol):
    """``await read(role, head, ids, positions) -> values``: anything that a head reads off a model held by the run.

    ``positions[b]``, increasing, are the tokens of ``ids[b]`` that the head is over (with ``at="at"`` it reads what
    stands after them, with ``"before"`` what predicts them), ``values[b]`` what it gave there: numbers, or lists of
    them. The head's own ``over`` is only a name here; its ``columns`` must be empty.
    """

    def __call__(
        self, role: str, head: Head, ids: Sequence[Sequence[int]], positions: Sequence[Sequence[int]], /
    ) -> Awaitable[list[list[Any]]]: ...


@dataclass(frozen=True, slots=True)
class RewardContext:
    """What a reward gets before the run starts."""

    score_with_role: ScoreWithRole | None = None
    """The scores of a role this reward declared (its head is ``scalar``); None where the reward declared none."""
    seed: int = 0
    read_role: ReadRole | None = None
    """Other outputs of a role this reward declared; None where the reward declared none."""
    tokens: Tokens | None = None
    """The policy's tokenizer, for rewards that look at ``Turn.ids``; a run always gives it."""
    credit: Literal["outcome", "step"] = "outcome"
    """``step``: the run places ``RewardResult.steps`` at their tokens. ``outcome``: it adds them to ``value``, so a
    source that sums its steps up in ``value`` gives none."""


class Reward(Component):
    """``score`` may be ``async def`` (runs on the event loop, cancelled at its deadline) or plain ``def`` (runs
    in a worker process that is killed at its deadline; then the instance is built again in the worker from its
    reference and config). Complete example::

        class Brevity(Reward):
            name = "brevity"

            async def score(self, group):
                return [RewardResult(-float(len(t.answer))) for t in group.trajectories]
    """

    per_sample: bool = False
    """True: in a run ``score`` gets groups of one trajectory, those of a prompt at the same time. Each call has the
    deadline and the retries, and what fails is that sample alone. For rewards that never look at the siblings."""

    def roles(self) -> tuple[RoleSpec, ...]:
        """Models this reward needs; placed, loaded and put to sleep by the run like any other role."""
        return ()

    async def setup(self, context: RewardContext) -> None:
        """Once, before the first group. Not called in worker processes."""

    @abstractmethod
    def score(self, group: Group) -> list[RewardResult] | Awaitable[list[RewardResult]]:
        """One result per trajectory, in order. The whole data row is ``group.row``; the group's siblings are
        visible. Another number of results, a non-number or NaN is refused, never broadcast."""
