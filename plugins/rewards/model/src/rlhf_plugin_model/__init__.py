"""Reward: a sequence-classification reward model."""

from __future__ import annotations

import math
from functools import cached_property

from pydantic import Field
from rlhf import hookimpl
from rlhf.errors import ConfigError, ModelError, RewardError
from rlhf.fields import PathText
from rlhf.interfaces import ComponentConfig, Reward, RewardContext
from rlhf.interfaces.reward import ScoreWithRole
from rlhf.steps import STEP_SEPARATOR
from rlhf.types import Group, RewardResult, RoleSpec, Trajectory, Turn
from rlhf.types.images import joined_images
from rlhf_hub.published import settings_of


class ModelConfig(ComponentConfig):
    """The model, and the normalisation of its output."""

    model: PathText = Field(min_length=1)
    """Path or hub name of a sequence-classification model with one output. ``--reward model:PATH`` sets it."""
    role: str = "reward_model"
    """Name of the model's role, which ``[roles.NAME]`` configures. A second reward model needs another role."""
    normalise: bool = False
    """(output - mean) / std, with ``mean`` and ``std`` from the model's ``config.json``, where training saved them."""


class ModelReward(Reward):
    """The model is a role of the run: placed, loaded and put to sleep like the others.

    It reads the tokens and images of the trajectory (from the last rewritten context on). Nothing is decoded and
    encoded again, so the model must have been trained with the policy's tokenizer and chat template. A model of text
    refuses trajectories with images.
    """

    name = "model"
    source = "Ouyang et al. 2022, arXiv:2203.02155"
    Config = ModelConfig
    passes_at_one = False

    def __init__(self, config: ModelConfig | None = None) -> None:
        if config is None:
            raise ConfigError(f"reward {self.name!r} needs `model`: a path or a hub name; or write --reward model:PATH")
        super().__init__(config)
        self._mean, self._std, self._vocabulary = 0.0, 1.0, math.inf
        self._score: ScoreWithRole | None = None

    def roles(self) -> tuple[RoleSpec, ...]:
        """Raises ConfigError if the model scores steps, because it has no score of a whole answer. Raises ModelError if
        the model was saved without the values that ``normalise`` reads."""
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
        """The separator of the steps that the model was trained on; None if it does not score steps."""
        try:
            return settings_of(self.config.model, f"reward {self.name!r}").get(STEP_SEPARATOR)
        except ModelError:
            return None  # loading the model reports a missing one

    def _scale(self) -> tuple[float, float]:
        """Mean and standard deviation of the model's outputs, saved by its training."""
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
        contexts = [_last_context(t) for t in group.trajectories]
        ids = [[i for turn in turns for i in turn.ids] for turns in contexts]
        largest = max(max(i) for i in ids)
        if largest >= self._vocabulary:
            raise RewardError(
                f"token {largest} is outside the vocabulary of {self.config.model!r} "
                f"({self._vocabulary} tokens); a reward model must share the policy's tokenizer"
            )
        images = [joined_images((len(turn.ids), turn.images) for turn in turns) for turns in contexts]
        outputs = await self._score(self.config.role, ids, *([images] if any(images) else []))
        return [RewardResult((float(v) - self._mean) / self._std, info={"output": float(v)}) for v in outputs]


def _last_context(trajectory: Trajectory) -> list[Turn]:
    """The turns of the last context: prompt, observations and answers."""
    start = max((i for i, t in enumerate(trajectory.turns) if t.fresh), default=0)
    return trajectory.turns[start:]


@hookimpl
def rlhf_register_reward() -> list[type]:
    return [ModelReward]
