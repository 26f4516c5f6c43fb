"""Samples: turns of tokens, trajectories of turns, groups of trajectories, and their rewards."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from rlhf.types.arrays import FloatArray, IntArray, float_array, int_array
from rlhf.types.experts import ExpertRecord
from rlhf.types.images import Image
from rlhf.types.rows import Row

Finish = Literal["stop", "length", "abort"]


@dataclass(slots=True)
class Turn:
    """Consecutive tokens of one origin: context for the policy, tokens it sampled, or an observation.

    Text is never tokenised again for training: ``ids`` are the tokens that the model saw or sampled.

    Any sequences of ints and floats become arrays: ``Turn(ids=[5, 7], sampled=False)``. Samples of one prompt may share
    an array, so assign a new array instead of changing one in place.

    Raises TypeError or ValueError if ``ids`` contains anything but ints below 2**31, and TypeError if ``logprobs``
    contains anything but numbers.
    """

    ids: IntArray
    """``array("i")``, one int per token."""
    sampled: bool
    """True if the policy sampled these tokens, or if they replace its samples (:attr:`is_demonstration`). False for
    tokens of prompt, environment and tools."""
    logprobs: FloatArray | None = None
    """``array("f")``: the log-prob of each token under the sampling distribution, as the generator
    reports it; sampled turns only."""
    versions: tuple[tuple[int, int], ...] = ()
    """((first token, weight version), ...): the version of the weights that sampled the tokens from that one on."""
    finish: Finish | None = None
    """Why sampling ended: ``stop`` (end token or stop string), ``length`` (budget used up), ``abort``."""
    temperature: float = 1.0
    reward: float | None = None
    """Reward for this sampled turn, from an environment or the rollout."""
    text: str = ""
    """Decoded text without special tokens. Rewards and environments read it."""
    fresh: bool = False
    """The context was rewritten before this turn (compaction, stripped thinking): a new sequence begins in the same
    trajectory."""
    is_demonstration: bool = False
    """An answer from the data instead of a sample of the policy. ``sampled`` is also True."""
    images: tuple[Image, ...] = ()
    """The images that tokens of this turn stand for, in order; turns that were not sampled only."""
    score: float | None = None
    """Read by the dynamic filter instead of the sum of the turns' rewards; sampled turns only. The last one of a
    trajectory counts."""
    messages: tuple[tuple[str, str], ...] = ()
    """((role, text), ...): the messages that a chat template rendered as these tokens, for people to read. Sampled
    turns and the row's own prompt have none."""
    experts: ExpertRecord | None = None
    """The experts that a mixture of experts chose while it sampled this turn (``GeneratorSpec.experts``). The last
    token of the turn has no record, because it is never an input. The record may begin before the turn, with tokens of
    its context."""
    agent: str = ""
    """The agent whose conversation contains the turn, if the policy plays several
    (:meth:`~rlhf.interfaces.Env.agents`). Also set on turns that were not sampled."""

    if TYPE_CHECKING:  # the constructor takes more types than the fields have

        def __init__(
            self,
            ids: Sequence[int],
            sampled: bool,
            logprobs: Sequence[float] | None = None,
            versions: tuple[tuple[int, int], ...] = (),
            finish: Finish | None = None,
            temperature: float = 1.0,
            reward: float | None = None,
            text: str = "",
            fresh: bool = False,
            is_demonstration: bool = False,
            images: tuple[Image, ...] = (),
            score: float | None = None,
            messages: tuple[tuple[str, str], ...] = (),
            experts: ExpertRecord | None = None,
            agent: str = "",
        ) -> None: ...

    def __setattr__(self, name: str, value: Any) -> None:
        # Not in __post_init__, so that arrays assigned later are converted too.
        if name == "ids":
            value = int_array(value, "Turn.ids")
        elif name == "logprobs" and value is not None:
            value = float_array(value, "Turn.logprobs")
        object.__setattr__(self, name, value)


@dataclass(slots=True)
class RewardResult:
    """The result of one reward source for one trajectory. ``value=None`` means not applicable: the source is excluded
    from the trajectory's weighted sum. A trajectory without any value is excluded from its group's baseline."""

    value: float | None
    score: float | None = None
    """Read by the dynamic filter, without penalties. None: the filter reads ``value``."""
    steps: tuple[tuple[int, int, float], ...] = ()
    """((turn, token in turn, value), ...): process rewards."""
    info: dict[str, Any] = field(default_factory=dict)
    """JSON values stored with the sample. The means of numbers are the metrics ``reward/SOURCE/info/KEY``."""

    @property
    def total(self) -> float | None:
        """The value and its process rewards in one number; None if the source is not applicable."""
        if self.value is None and not self.steps:
            return None
        return (self.value or 0.0) + math.fsum(value for _, _, value in self.steps)


Status = Literal["ok", "truncated", "failed"]


@dataclass(slots=True)
class Trajectory:
    """One sample: its data row and its turns in order. If the policy plays several agents, a sample has one trajectory
    for each, with its own conversation and rewards."""

    row: Row
    turns: list[Turn]
    index: tuple[int, int]
    """(group number in the run, sample in the group). Every seed is ``derive_seed(run_seed, purpose, *index)``. The
    trajectories of a sample's agents share one index."""
    status: Status = "ok"
    rewards: dict[str, RewardResult] = field(default_factory=dict)
    """Results by name of the reward source."""
    reward: float | None = None
    """Weighted sum of the sources' values, plus the environment's turn rewards, before shaping."""
    score: float | None = None
    """Input of the dynamic filter: the weighted sum of the sources' ``score`` (``value`` for a source without a score),
    plus the last :attr:`Turn.score` (the sum of the turns' rewards without one)."""
    error: str = ""
    """First cause, if ``status`` is ``failed``."""
    info: dict[str, float] = field(default_factory=dict)
    """Numbers about the sample: ``env/KEY`` (``EnvStep.info``) and ``rollout/KEY`` (``RolloutContext.report``). Their
    means over samples are metrics with these names."""

    @property
    def agent(self) -> str:
        """The agent that plays these turns; empty if the policy plays only one."""
        return self.turns[0].agent if self.turns else ""

    @property
    def prompt_text(self) -> str:
        """Text of everything before the first sampled turn."""
        parts = []
        for turn in self.turns:
            if turn.sampled:
                break
            parts.append(turn.text)
        return "".join(parts)

    @property
    def completion(self) -> str:
        """Text of everything after the prompt, observations included."""
        sampled, parts = False, []
        for turn in self.turns:
            sampled = sampled or turn.sampled
            if sampled:
                parts.append(turn.text)
        return "".join(parts)

    @property
    def answer(self) -> str:
        """Text of the last sampled turn and the sampled turns directly before it: an answer may be several turns."""
        parts: list[str] = []
        for turn in reversed(self.turns):
            if turn.sampled:
                parts.append(turn.text)
            elif parts:
                break
        return "".join(reversed(parts))

    @property
    def sampled_tokens(self) -> int:
        """Number of tokens in sampled turns: the length that penalties use."""
        return sum(len(t.ids) for t in self.turns if t.sampled)

    @property
    def is_demonstration(self) -> bool:
        """Whether the answer comes from the data (:attr:`Turn.is_demonstration`)."""
        return any(turn.is_demonstration for turn in self.turns)

    @property
    def truncated(self) -> bool:
        """Whether the last sampled turn ended because its token budget was used up."""
        last = next((t for t in reversed(self.turns) if t.sampled), None)
        return self.status == "truncated" or (last is not None and last.finish == "length")


@dataclass(slots=True)
class Group:
    """The samples of one prompt, in sample order."""

    row: Row
    number: int
    trajectories: list[Trajectory]

    def by_agent(self) -> dict[str, Group]:
        """{agent: its trajectories}, ordered by name. Comparisons of a prompt's samples are within one agent. The group
        itself if the policy plays only one."""
        agents = sorted({trajectory.agent for trajectory in self.trajectories})
        if len(agents) < 2:
            return dict.fromkeys(agents, self)
        return {a: Group(self.row, self.number, [t for t in self.trajectories if t.agent == a]) for a in agents}
