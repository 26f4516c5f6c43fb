"""Durations of the parts of a run, measured in a short run with a timeline or set by flags."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import NormalDist, fmean

from rlhf.errors import ConfigError

FLAGS = {
    "answer-tokens": ("MEAN[,P95]", "tokens of an answer (of each turn)"),
    "tokens-per-second": ("N", "speed of one answer, at any load of its engine"),
    "env-seconds": ("MEAN[,P95]", "time of the environment after a turn"),
    "reward-seconds": ("MEAN[,P95]", "time to score a group"),
    "learn-seconds": ("S", "time to learn from a batch"),
    "sync-seconds": ("S", "time of a weight sync"),
    "turns": ("N", "turns of a sample, without --speeds (default: 1)"),
}
NEEDED = ("answer-tokens", "tokens-per-second", "learn-seconds")
"""Flags that are required for step times, unless a run was measured."""
GROUPS = 512
"""Number of groups that are drawn if lengths or delays are set as a distribution."""
STEPS, SAMPLES = 40, 20_000
"""Largest number of planned steps, and of planned samples. At least 8 steps are planned."""


@dataclass(frozen=True, slots=True)
class TurnTimes:
    tokens: int
    """Sampled tokens."""
    after: float
    """Seconds until the request for the next turn, or the end of the sample: the environment's step."""


@dataclass(frozen=True, slots=True)
class SampleTimes:
    turns: tuple[TurnTimes, ...]
    opening: float = 0.0
    """Seconds until the request for the first turn: opening the environment."""
    context: int = 0
    """Tokens that are not sampled."""

    @property
    def tokens(self) -> int:
        return sum(turn.tokens for turn in self.turns)


@dataclass(frozen=True, slots=True)
class GroupTimes:
    samples: Sequence[SampleTimes]
    reward: float = 0.0
    """Seconds of scoring."""

    def sample(self, index: tuple[int, int], count: int) -> SampleTimes:
        """The times of a sample in a group of ``count``: its own times if this group has ``count`` samples, else those
        of one of its samples."""
        if count == len(self.samples):
            return self.samples[index[1]]
        return random.Random(f"sample {index}").choice(self.samples)


@dataclass(frozen=True)
class Speeds:
    groups: Sequence[GroupTimes]
    token: float
    """An answer gets a token in ``token + per_answer * n`` seconds, where n is the number of answers that its engine
    samples at that time."""
    learn_a_token: float
    """Seconds of learning for a token of the batch, prompts included."""
    per_answer: float = 0.0
    request: float = 0.0
    """Seconds from a request to its first token."""
    sync: float = 0.0
    pause: float = 0.0
    """The part of ``sync`` in which nothing is sampled."""
    other: float = 0.0
    """Seconds of a step that belong to no phase: sleeping and waking of engines, the controller."""
    rejected: float = 0.0
    """Share of the groups that ``stream.filter`` rejects, or whose samples fail."""

    def group(self, number: int) -> GroupTimes:
        return random.Random(number).choice(self.groups)

    @cached_property
    def tokens(self) -> float:
        """Mean number of tokens of a sample, including the prompt."""
        return fmean(s.tokens + s.context for group in self.groups for s in group.samples)

    def learn(self, samples: int) -> float:
        """Seconds of learning for a batch."""
        return self.learn_a_token * samples * self.tokens

    def steps_to_plan(self, samples: int) -> int:
        return max(8, min(STEPS, SAMPLES // samples))


@dataclass(frozen=True)
class Distribution:
    """A log-normal distribution, or one value if ``p95`` is the mean."""

    mean: float
    p95: float

    @classmethod
    def parse(cls, text: str, option: str) -> Distribution:
        """``MEAN`` or ``MEAN,P95``. Raises ConfigError if ``text`` is neither, or no such distribution has both."""
        try:
            mean, *quantile = (float(part) for part in text.split(","))
            [p95] = quantile or [mean]
        except ValueError:
            raise ConfigError(f"{option} is {text!r}; give MEAN or MEAN,P95, e.g. 300 or 300,800") from None
        # P95 / mean = exp(z s - s^2 / 2) is largest at s = z.
        bound = math.exp(_Z95**2 / 2) * mean
        if not (0 < mean < math.inf and mean <= p95 <= bound):
            raise ConfigError(
                f"{option} is {text!r}: the mean must be above 0, and P95 from the mean to {bound:g}, which is the "
                "largest of a log-normal distribution with this mean"
            )
        return cls(mean, p95)

    def draw(self, source: random.Random) -> float:
        # The smaller root s of s^2 / 2 - z s + log(P95 / mean) = 0.
        sigma = _Z95 - math.sqrt(max(0.0, _Z95**2 - 2 * math.log(self.p95 / self.mean)))
        return math.exp(source.gauss(math.log(self.mean) - sigma * sigma / 2, sigma))


_Z95 = NormalDist().inv_cdf(0.95)


def with_distributions(
    speeds: Speeds, answer: Distribution | None, env: Distribution | None, reward: Distribution | None, longest: int
) -> Speeds:
    """``speeds`` with randomly drawn lengths of answers, seconds of environments after a turn, and seconds of rewards
    of a group. None: unchanged.

    Args:
        longest: largest number of tokens of a turn.
    """
    if answer is env is reward is None:
        return speeds
    source = random.Random(0)

    def turn(times: TurnTimes) -> TurnTimes:
        tokens = times.tokens if answer is None else max(1, round(answer.draw(source)))
        return TurnTimes(min(tokens, longest), times.after if env is None else env.draw(source))

    groups = [
        GroupTimes(
            [replace(sample, turns=tuple(turn(times) for times in sample.turns)) for sample in group.samples],
            group.reward if reward is None else reward.draw(source),
        )
        for group in (speeds.groups[n % len(speeds.groups)] for n in range(max(GROUPS, len(speeds.groups))))
    ]
    return replace(speeds, groups=groups)
