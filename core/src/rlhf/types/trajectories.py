"""What the policy does with a row: turns of tokens, trajectories of turns, groups of trajectories, each scored."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from rlhf.types.rows import Row

Finish = Literal["stop", "length", "abort"]


@dataclass(slots=True)
class Turn:
    """A run of tokens of one origin: the context given to the policy, what it sampled, or what it observed.

    Text that is trained on is never tokenised again: ``ids`` are the tokens the model saw or chose.
    """

    ids: list[int]
    sampled: bool
    """True where the policy chose these tokens, or they stand for its choice (:attr:`given`); False for prompt,
    environment and tool tokens."""
    logprobs: list[float] | None = None
    """Per token, of the sampling distribution, as the generator reports it; sampled turns only."""
    versions: tuple[tuple[int, int], ...] = ()
    """((first token, weight version), ...): which weights chose the tokens from there on."""
    finish: Finish | None = None
    """Why sampling ended: ``stop`` (end token or stop string), ``length`` (budget used up), ``abort``."""
    temperature: float = 1.0
    reward: float | None = None
    """Reward an environment gave for this (sampled) turn."""
    text: str = ""
    """Decoded, special tokens left out; rewards and environments read this."""
    fresh: bool = False
    """The context was rewritten here (compaction, stripped thinking): a new sequence, same trajectory."""
    given: bool = False
    """A sampled turn that nobody sampled: an answer that the data gives, which stands where the policy's would."""


@dataclass(slots=True)
class RewardResult:
    """What one reward source says about one trajectory. ``value=None`` means not applicable: the source is
    left out of this trajectory's sum, and a trajectory without any value leaves its group's baseline."""

    value: float | None
    score: float | None = None
    """Used by the dynamic filter before any penalty; ``value`` where absent."""
    steps: tuple[tuple[int, int, float], ...] = ()
    """((turn, token in turn, value), ...): process rewards."""
    info: dict[str, Any] = field(default_factory=dict)
    """Anything of JSON: kept with the sample; the means of its numbers are metrics, ``reward/SOURCE/info/KEY``."""


Status = Literal["ok", "truncated", "failed"]


@dataclass(slots=True)
class Trajectory:
    """One sample: its data row and its turns in order."""

    row: Row
    turns: list[Turn]
    index: tuple[int, int]
    """(group number in the run, sample in the group). Every seed is ``derive_seed(run_seed, purpose, *index)``."""
    status: Status = "ok"
    rewards: dict[str, RewardResult] = field(default_factory=dict)
    """By the name of the reward source."""
    reward: float | None = None
    """Weighted sum of the sources' values and the environment's turn rewards, before shaping."""
    score: float | None = None
    """What the dynamic filter reads: the weighted ``score`` of the sources, their ``value`` where one gave none."""
    error: str = ""
    """First cause, where ``status`` is ``failed``."""

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
        seen, parts = False, []
        for turn in self.turns:
            seen = seen or turn.sampled
            if seen:
                parts.append(turn.text)
        return "".join(parts)

    @property
    def answer(self) -> str:
        """Text of the last sampled turn."""
        return next((t.text for t in reversed(self.turns) if t.sampled), "")

    @property
    def sampled_tokens(self) -> int:
        """Number of tokens that the policy itself chose: the only length that penalties count."""
        return sum(len(t.ids) for t in self.turns if t.sampled)

    @property
    def given(self) -> bool:
        """Its answer is the data's (:attr:`Turn.given`)."""
        return any(turn.given for turn in self.turns)

    @property
    def truncated(self) -> bool:
        """The last sampled turn ended because its token budget was used up."""
        last = next((t for t in reversed(self.turns) if t.sampled), None)
        return self.status == "truncated" or (last is not None and last.finish == "length")


@dataclass(slots=True)
class Group:
    """The samples of one prompt, in sample order."""

    row: Row
    number: int
    trajectories: list[Trajectory]
