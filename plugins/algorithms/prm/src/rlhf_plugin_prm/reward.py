"""The reward: the probability that each step of an answer is right, at the token that ends the step."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, Literal

from pydantic import Field, field_validator
from rlhf.errors import ConfigError, RewardError
from rlhf.fields import PathText
from rlhf.interfaces import ComponentConfig, Reward, RewardContext
from rlhf.steps import StepEnds
from rlhf.types import Group, RewardResult, RoleSpec, Trajectory
from rlhf_hub.published import settings_of

from rlhf_plugin_prm.heads import CLASSES, step_logits
from rlhf_plugin_prm.places import Context, contexts, last_token
from rlhf_plugin_prm.published import head_of, label_ids, separator_of

AGGREGATES: dict[str, Callable[[Sequence[float]], float]] = {
    "min": min,
    "mean": lambda values: sum(values) / len(values),
    "last": lambda values: values[-1],
    "product": math.prod,
    "sum": sum,
}


class ProcessRewardConfig(ComponentConfig):
    """The model, the text that ends a step, and how the values of steps are combined."""

    model: PathText = Field(min_length=1)
    """Path or hub name of a process reward model: two classes (0 wrong, 1 right), or a language model with two label
    tokens. It must have the policy's tokenizer."""
    role: str = "process_reward_model"
    """Name of the role that holds it (``[roles.NAME]`` configures that). A second such model needs another."""
    label_tokens: tuple[str, str] | None = None
    """For a language model: the texts for right and for wrong, one token each. Default: those in its ``config.json``,
    which training wrote."""
    separator: str | None = Field(default=None, min_length=1)
    """Text that ends a step: ``data.step_separator`` of the model's training. Default: the one in its ``config.json``,
    which training wrote, else a line break."""
    aggregate: Literal["min", "mean", "last", "product", "sum"] = "min"
    """How the values of the steps are combined into the value of an answer. With ``credit = "step"`` the result is only
    a score for filters and evaluations."""
    baseline: float = 0.0
    """Subtracted from each step's probability before the aggregate: with 0.5, steps that are probably wrong get a
    negative value."""
    without_steps: Literal["skip", "last_token"] = "skip"
    """An answer in which no step ends: ``skip`` gives it no value (not applicable), ``last_token`` reads the model
    after its last token, as if a step ended there."""

    @field_validator("label_tokens", mode="before")
    @classmethod
    def _pair(cls, value: Any) -> Any:
        return tuple(value) if isinstance(value, list) else value  # TOML has no tuples


class ProcessReward(Reward):
    """The probability that a step is right, less ``baseline``, for every step that ends in the policy's own tokens.

    With ``credit = "step"`` in its section the values go to their tokens (``RewardResult.steps``), and the aggregate is
    the score that the dynamic filter reads. With ``credit = "outcome"`` the aggregate is the answer's value. No step
    counts twice.

    The model is a role of the run and reads the same tokens and images as the policy: of a trajectory with several
    turns, all that the policy saw up to each step.
    """

    name = "prm"
    source = "Lightman et al. 2023, arXiv:2305.20050; Wang et al. 2023, arXiv:2312.08935"
    Config = ProcessRewardConfig
    passes_at_one = False  # nearly all probabilities are below 1

    def __init__(self, config: ProcessRewardConfig | None = None) -> None:
        if config is None:
            raise ConfigError(f"reward {self.name!r} needs `model`: the path or hub name of a process reward model")
        super().__init__(config)
        self._context: RewardContext | None = None

    @cached_property
    def _settings(self) -> dict[str, Any]:
        return settings_of(self.config.model, "reward 'prm'")

    @cached_property
    def _head(self) -> str:
        return head_of(self._settings, self.config.model)

    @cached_property
    def _separator(self) -> str:
        return separator_of(self._settings, self.config.model, self.config.separator)

    def roles(self) -> tuple[RoleSpec, ...]:
        """Raises ConfigError, before a model is loaded, if an option contradicts the model, or if neither the options
        nor ``config.json`` name the label tokens of a language model."""
        assert self._separator
        self._check_labels()
        return (RoleSpec(self.config.role, head=self._head, model=self.config.model),)

    def _check_labels(self) -> None:
        labels = self.config.label_tokens
        if self._head == CLASSES:
            if labels is not None:
                raise ConfigError(f"reward {self.name!r}: {self.config.model!r} has two classes and no label_tokens")
        elif labels is None and label_ids(self._settings) is None:
            raise ConfigError(
                f"reward {self.name!r}: {self.config.model!r} is a language model whose config.json does not say which "
                'tokens its labels are. Set label_tokens, e.g. ["+", "-"] (right, wrong)'
            )

    async def setup(self, context: RewardContext) -> None:
        if context.tokens is None:
            raise RewardError(f"reward {self.name!r} needs the policy's tokenizer, which this run does not give")
        self._context, self._ends = context, StepEnds(context.tokens.decode, self._separator)
        self._read = step_logits()
        self._check_labels()
        if self._head == CLASSES:
            return
        labels = self.config.label_tokens
        label_tokens = None if labels is None else tuple(context.tokens.single(t, "label_tokens") for t in labels)
        self._read = step_logits(*(label_tokens or label_ids(self._settings) or ()))

    async def score(self, group: Group) -> list[RewardResult]:
        if self._context is None or self._context.read_role is None:
            raise RewardError(f"this run does not hold the role {self.config.role!r}")
        contexts_of_samples = [self._contexts(t) for t in group.trajectories]
        flat = [context for sample_contexts in contexts_of_samples for context in sample_contexts if context.positions]
        images = [c.images for c in flat]
        logits = await self._context.read_role(
            self.config.role,
            self._read,
            [c.ids for c in flat],
            [c.positions for c in flat],
            *([images] if any(images) else []),
        )
        values = iter(logits)
        return [
            self._result([(place, logit) for c in sample_contexts if c.positions
                          for place, logit in zip(c.places, next(values), strict=True)])
            for sample_contexts in contexts_of_samples
        ]  # fmt: skip

    def _contexts(self, trajectory: Trajectory) -> list[Context]:
        all_contexts = contexts(trajectory, self._ends)
        if self.config.without_steps == "last_token" and not any(c.positions for c in all_contexts):
            return last_token(trajectory)
        return all_contexts

    def _result(self, logits: list[tuple[tuple[int, int], float]]) -> RewardResult:
        assert self._context is not None
        if not logits:
            return RewardResult(None, info={"steps": 0})
        steps = [(turn, token, _probability(logit) - self.config.baseline) for (turn, token), logit in logits]
        aggregate = AGGREGATES[self.config.aggregate]([value for _, _, value in steps])
        info = {"steps": len(steps), "probabilities": [value + self.config.baseline for _, _, value in steps]}
        if self._context.credit == "step":
            return RewardResult(None, score=aggregate, steps=tuple(steps), info=info)
        return RewardResult(aggregate, info=info)


def _probability(logit: float) -> float:
    """sigma(logit), without overflow."""
    return 1 / (1 + math.exp(-logit)) if logit >= 0 else math.exp(logit) / (1 + math.exp(logit))
