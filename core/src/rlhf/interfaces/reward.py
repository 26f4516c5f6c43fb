"""Rewards: score the trajectories of a group."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Awaitable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from rlhf.interfaces.component import Component
from rlhf.interfaces.tokens import Tokens
from rlhf.types import Group, Head, Image, RewardResult, RoleSpec

Images = Sequence[tuple[Image, ...]]
"""The images of each sequence, or none at all."""


class ScoreWithRole(Protocol):
    """``await score(role, token lists, images) -> values``: a reward model held by the run.

    ``images[b]`` are the images of ``ids[b]`` in order. :attr:`rlhf.types.Image.start` counts from its first token.
    Without ``images`` no sequence has any.
    """

    def __call__(self, role: str, ids: Sequence[Sequence[int]], images: Images = (), /) -> Awaitable[list[float]]: ...


class ReadRole(Protocol):
    """``await read(role, head, ids, positions, images) -> values``: the outputs of a head on a model held by the run.

    ``positions[b]``, in increasing order, are the tokens of ``ids[b]`` at which the head is computed.
    :attr:`rlhf.types.Head.position` selects the outputs that predict the token, or those after it. ``values[b]`` holds
    one number, or list of numbers, per position. The head's ``over`` is not used, and its ``columns`` must be empty.
    ``images`` are as for :class:`ScoreWithRole`.
    """

    def __call__(
        self,
        role: str,
        head: Head,
        ids: Sequence[Sequence[int]],
        positions: Sequence[Sequence[int]],
        images: Images = (),
        /,
    ) -> Awaitable[list[list[Any]]]: ...


@dataclass(frozen=True, slots=True)
class RewardContext:
    """The input of :meth:`Reward.setup`, before the first group."""

    score_with_role: ScoreWithRole | None = None
    """Scores from a role that this reward declared, with a ``scalar`` head; None if it declared no role."""
    seed: int = 0
    read_role: ReadRole | None = None
    """Other outputs of a role that this reward declared; None if it declared no role."""
    tokens: Tokens | None = None
    """The policy's tokenizer, for rewards that read ``Turn.ids``. Always set in a run."""
    credit: Literal["outcome", "step"] = "outcome"
    """``step``: the run credits ``RewardResult.steps`` to their tokens. ``outcome``: the run adds them to ``value``.
    Then a source whose ``value`` already contains the sum of its steps must return no steps."""


class Reward(Component):
    """``score`` may be ``async def`` or plain ``def``. ``async def`` runs on the event loop and is cancelled at its
    deadline. Plain ``def`` runs in a worker process, which builds the instance again from its reference and config and
    is killed at the deadline. Complete example::

        class Brevity(Reward):
            name = "brevity"

            async def score(self, group):
                return [RewardResult(-float(len(t.answer))) for t in group.trajectories]
    """

    per_sample: bool = False
    """True: ``score`` gets groups of one trajectory, and the trajectories of a prompt are scored concurrently. Each
    call has its own deadline and retries, and a failure fails only that sample. For rewards that do not compare the
    samples of a group."""
    concurrency: int | None = None
    """Largest number of concurrent calls of ``score`` if the reward's section does not set one; None: the runtime's
    default. An instance may set it. A reward whose calls keep a processor busy should set how many it can serve at
    once, because time spent waiting for a free call does not count towards the deadline."""
    passes_at_one: bool = True
    """Whether an answer with a value of 1 or more passes. False: values are scores without such a threshold, as those
    of a reward model. An evaluation then has pass@k and avg@k only if ``eval.pass_threshold`` is set. An instance may
    set it."""
    reads: Literal["text", "tokens"] = "tokens"
    """What ``score`` reads of the turns. ``text``: only their texts (prompt, completion, answer). Such a reward can
    score answers without a tokenizer. ``Turn.ids`` is then empty, so it has no roles and does not use
    ``RewardContext.tokens``. ``tokens``: also ``Turn.ids``. An instance may set it."""

    is_teacher: bool = False
    """True: ``score`` gives no value. ``RewardResult.steps`` holds the log-prob of a teacher for every token that the
    policy sampled, at temperature 1. An algorithm reads them (:attr:`RunOptions.teachers`). They enter no reward and no
    score, and evaluations do not request them. Declared by the class."""

    def roles(self) -> tuple[RoleSpec, ...]:
        """Models that this reward needs. The run places, loads and puts them to sleep like any other role."""
        return ()

    def columns(self) -> Collection[str]:
        """Columns that ``score`` requires, according to the options. Omit a column that ``score`` reads only if the row
        has it. A value may be None. A mapping {column: option} names the option that sets the column, for messages.

        A run is refused before a model is loaded if no row of a source that the reward scores has such a column. If
        only some rows of a source lack it, the error is raised when such a row is scored."""
        return ()

    def texts(self) -> Collection[str]:
        """Texts that an answer must contain for a good score, according to the options, such as tags. A run that
        samples is refused if one contains a special token of the policy's tokenizer, because the texts of turns have
        none."""
        return ()

    async def setup(self, context: RewardContext) -> None:
        """Called once, before the first group. Not called in worker processes."""

    @abstractmethod
    def score(self, group: Group) -> list[RewardResult] | Awaitable[list[RewardResult]]:
        """One result per trajectory, in order. ``group.row`` is the whole data row. A wrong number of results, a value
        that is not a number, or NaN is an error. So is a list ``group.trajectories`` that was sorted or filtered in
        place."""
