"""A reward that measures: how far an answer's tokens are from the model that the policy started from.

In `eval.toml` its weight is 0, so it is reported beside the reward and does not change it.
"""

from __future__ import annotations

from pydantic import Field
from rlhf.errors import ConfigError, RewardError
from rlhf.fields import PathText
from rlhf.interfaces import ComponentConfig, Reward, RewardContext
from rlhf.ops.heads import LOGPROBS
from rlhf.types import Group, RewardResult, RoleSpec, Trajectory

ROLE = "start"


class KLConfig(ComponentConfig):
    """The model to compare with."""

    model: PathText = Field(min_length=1)
    """Folder or hub name of a language model with the policy's tokenizer."""


class KL(Reward):
    """The sum over an answer's sampled tokens of log-prob under the policy - log-prob under the model. Its mean over
    answers estimates KL(policy || model) of a whole answer, in nats, where they are drawn at temperature 1
    (``--eval.temperature 1``): greedy answers are no sample of the policy.
    """

    name = "kl"
    Config = KLConfig

    def __init__(self, config: KLConfig | None = None) -> None:
        if config is None:
            raise ConfigError("reward 'kl' needs `model`: the model to compare with")
        super().__init__(config)

    def roles(self) -> tuple[RoleSpec, ...]:
        return (RoleSpec(ROLE, model=self.config.model),)

    async def setup(self, context: RewardContext) -> None:
        self._read = context.read_role

    async def score(self, group: Group) -> list[RewardResult]:
        assert self._read is not None, "roles() names one"
        ids = [[i for turn in t.turns for i in turn.ids] for t in group.trajectories]
        logprobs = await self._read(ROLE, LOGPROBS, ids, [_sampled(t) for t in group.trajectories])
        return [RewardResult(_policy(t) - sum(values)) for t, values in zip(group.trajectories, logprobs, strict=True)]


def _sampled(trajectory: Trajectory) -> list[int]:
    """Positions of the sampled tokens."""
    origins = [turn.sampled for turn in trajectory.turns for _ in turn.ids]
    return [position for position, sampled in enumerate(origins) if sampled]


def _policy(trajectory: Trajectory) -> float:
    """The answer's log-prob under the policy."""
    sampled = [turn.logprobs for turn in trajectory.turns if turn.sampled]
    if any(logprobs is None for logprobs in sampled):
        raise RewardError(
            "reward 'kl' reads the log-probs of sampled answers. Use `rlhf eval`: given answers have none"
        )
    return sum(logprob for logprobs in sampled for logprob in logprobs or ())
