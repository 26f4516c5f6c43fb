"""The reward: what a reward model with a scalar head says at the last token."""

from __future__ import annotations

import math
from functools import cached_property

from pydantic import Field
from rlhf.errors import ConfigError, ModelError, RewardError
from rlhf.interfaces import ComponentConfig, Reward, RewardContext
from rlhf.interfaces.reward import ScoreWithRole
from rlhf.paths import PathText
from rlhf.steps import STEP_SEPARATOR
from rlhf.types import Group, RewardResult, RoleSpec, Trajectory
from rlhf_hub.published import settings_of


class ModelConfig(ComponentConfig):
    """Which model, and what is done with its output."""

    model: PathText = Field(min_length=1)
    """Path or hub name of a sequence-classification model with one output. ``--reward model:PATH`` sets it."""
    role: str = "reward_model"
    """Name of the role that holds it (``[roles.NAME]`` configures that). A second reward model needs another."""
    normalise: bool = False
    """(output - mean) / std, with ``mean`` and ``std`` from the model's ``config.json``, where training left them."""


class ModelReward(Reward):
    """The model is a role of the run: placed, loaded and put to sleep like any other.

    It reads the very tokens of the trajectory (from the last rewritten context on), so nothing is decoded and encoded
    again; it must therefore have been trained with the policy's tokenizer and chat template.
    """

    name = "model"
    source = "Ouyang et al. 2022, arXiv:2203.02155"
    Config = ModelConfig

    def __init__(self, config: ModelConfig | None = None) -> None:
        if config is None:
            raise ConfigError(f"reward {self.name!r} needs `model`: a path or a hub name; or write --reward model:PATH")
        super().__init__(config)
        self._mean, self._std, self._vocabulary = 0.0, 1.0, math.inf
        self._score: ScoreWithRole | None = None

    def roles(self) -> tuple[RoleSpec, ...]:
        """Raises ConfigError where the model scores steps: it has no score of a whole answer; ModelError where
        it was not saved with what ``normalise`` reads."""
        if self._separator is not None:
            raise ConfigError(
                f"reward {self.name!r}: {self.config.model!r} is a process reward model, which is read after each step "
                f"that ends with {self._separator!r}. Use --reward plugin:prm --reward.prm.model {self.config.model}"
            )
        if self.config.normalise:
            self._scale()
        return (RoleSpec(self.config.role, head="scalar", model=self.config.model),)

    @cached_property
    def _separator(self) -> str | None:
        """What ends the steps that the model was trained on, where it was."""
        try:
            return settings_of(self.config.model, f"reward {self.name!r}").get(STEP_SEPARATOR)
        except ModelError:
            return None  # that there is no such model is said where it is loaded

    def _scale(self) -> tuple[float, float]:
        """Mean and standard deviation of its outputs, as its training saved them."""
        settings = settings_of(self.config.model, f"reward {self.name!r}")
        mean, std = settings.get("mean"), settings.get("std")
        if not isinstance(mean, int | float) or not isinstance(std, int | float) or not std > 0:
            raise ModelError(
                f"reward {self.name!r}: normalise = true needs the numbers `mean` and `std` > 0 in the config.json "
                f"of {self.config.model!r}, got mean = {mean!r}, std = {std!r}. Set normalise = false, or train "
                "the reward model so that it saves them."
            )
        return float(mean), float(std)

    async def setup(self, context: RewardContext) -> None:
        self._score = context.score_with_role
        settings = settings_of(self.config.model, f"reward {self.name!r}")
        self._vocabulary = settings.get("vocab_size") or settings.get("text_config", {}).get("vocab_size") or math.inf
        if self.config.normalise:
            self._mean, self._std = self._scale()

    async def score(self, group: Group) -> list[RewardResult]:
        if self._score is None:
            raise RewardError(f"this run does not hold the role {self.config.role!r}")
        ids = [_tokens(t) for t in group.trajectories]
        largest = max(max(i) for i in ids)
        if largest >= self._vocabulary:
            raise RewardError(
                f"token {largest} is outside the vocabulary of {self.config.model!r} "
                f"({self._vocabulary} tokens); a reward model must share the policy's tokenizer"
            )
        outputs = await self._score(self.config.role, ids)
        return [RewardResult((float(v) - self._mean) / self._std, info={"output": float(v)}) for v in outputs]


def _tokens(trajectory: Trajectory) -> list[int]:
    """The last context in full: prompt, observations and answers."""
    start = max((i for i, t in enumerate(trajectory.turns) if t.fresh), default=0)
    return [i for t in trajectory.turns[start:] for i in t.ids]
