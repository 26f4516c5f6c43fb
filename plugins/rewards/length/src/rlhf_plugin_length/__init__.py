"""Reward: a penalty for answers that are too short or too long."""

from __future__ import annotations

from pydantic import Field, model_validator
from rlhf import hookimpl
from rlhf.interfaces import ComponentConfig, Reward
from rlhf.types import Group, RewardResult


class LengthConfig(ComponentConfig):
    """The range and the penalty: ``value = inside - min(at_most, per_token x tokens outside the range)``."""

    low: int | None = Field(None, ge=0)
    """Smallest number of tokens without a penalty."""
    high: int | None = Field(None, ge=0)
    """Largest number of tokens without a penalty."""
    per_token: float = Field(0.01, gt=0.0)
    """Penalty per token below or above the range."""
    at_most: float = Field(1.0, gt=0.0)
    """Largest penalty."""
    inside: float = 0.0
    """Reward of an answer within the range."""

    @model_validator(mode="after")
    def _range(self) -> LengthConfig:
        if self.low is None and self.high is None:
            raise ValueError("set `low`, `high` or both: without a range nothing is penalised")
        if self.low is not None and self.high is not None and self.low > self.high:
            raise ValueError(f"the range needs low <= high, got low = {self.low}, high = {self.high}")
        return self


class LengthReward(Reward):
    """Counts the tokens that the policy sampled, over all turns, without prompt, observations and tool results."""

    name = "length"
    Config = LengthConfig
    conformance = {"configs": (LengthConfig(low=2, high=20),)}
    """Config for ``rlhf plugins check``, because the defaults have no range."""

    async def score(self, group: Group) -> list[RewardResult]:
        return [self._value(t.sampled_tokens) for t in group.trajectories]

    def _value(self, tokens: int) -> RewardResult:
        c = self.config
        distance = max(0, (c.low or 0) - tokens, 0 if c.high is None else tokens - c.high)
        return RewardResult(c.inside - min(c.at_most, c.per_token * distance), info={"tokens": tokens})


@hookimpl
def rlhf_register_reward() -> list[type]:
    return [LengthReward]
