"""The reward: the probability that each step of an answer is right, at the token that ends the step."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from pydantic import Field
from rlhf.errors import ConfigError, ModelError, RewardError
from rlhf.fields import PathText
from rlhf.interfaces import ComponentConfig, Reward, RewardContext
from rlhf.steps import STEP_SEPARATOR, StepEnds
from rlhf.types import Group, Image, RewardResult, RoleSpec, Trajectory
from rlhf.types.images import joined_images
from rlhf_hub.published import settings_of

from rlhf_plugin_prm.heads import CLASSES, RIGHT_TOKEN, WRONG_TOKEN, step_logits

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
    """Name of the model's role, which ``[roles.NAME]`` configures. A second such model needs another role."""
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
    """Value of an answer in which no step ends. ``skip``: none (not applicable). ``last_token``: the model is read
    after the last token, as if a step ended there."""

    open_step: Literal["skip", "close"] = "skip"
    """The text after an answer's last separator. ``skip``: it is not a step. ``close``: it is the last step. The model
    reads the separator after it, and its value is at its last token."""


class ProcessReward(Reward):
    """The probability that a step is right, minus ``baseline``, for every step that ends in the policy's own tokens.

    With ``credit = "step"`` in its section the values go to their tokens (``RewardResult.steps``), and the aggregate is
    the score that the dynamic filter reads. With ``credit = "outcome"`` the aggregate is the answer's value. No step
    counts twice.

    The model is a role of the run and reads the same tokens and images as the policy. In a trajectory with several
    turns, it reads everything that the policy saw up to each step.
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
                raise ConfigError(
                    f"reward {self.name!r}: {self.config.model!r} has two classes and does not use label_tokens; "
                    "remove them"
                )
        elif labels is None and label_ids(self._settings) is None:
            raise ConfigError(
                f"reward {self.name!r}: {self.config.model!r} is a language model whose config.json does not say which "
                'tokens its labels are. Set label_tokens, e.g. ["+", "-"] (right, wrong)'
            )

    async def setup(self, context: RewardContext) -> None:
        if context.tokens is None:
            raise RewardError(f"reward {self.name!r} needs the policy's tokenizer, which this run does not provide")
        self._context, self._ends = context, StepEnds(context.tokens.decode, self._separator)
        self._separator_ids = context.tokens.encode(self._separator)
        self._step_head = step_logits()
        self._check_labels()
        if self._head == CLASSES:
            return
        labels = self.config.label_tokens
        label_tokens = None if labels is None else tuple(context.tokens.single(t, "label_tokens") for t in labels)
        self._step_head = step_logits(*(label_tokens or label_ids(self._settings) or ()))

    async def score(self, group: Group) -> list[RewardResult]:
        if self._context is None or self._context.read_role is None:
            raise RewardError(f"this run does not hold the role {self.config.role!r}")
        contexts_of_samples = [self._contexts(t) for t in group.trajectories]
        flat = [context for sample_contexts in contexts_of_samples for context in sample_contexts if context.positions]
        images = [c.images for c in flat]
        logits = await self._context.read_role(
            self.config.role,
            self._step_head,
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
        if self.config.open_step == "close":
            close_last_step(all_contexts, trajectory, self._ends, self._separator_ids)
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


@dataclass(slots=True)
class Context:
    """One context of a trajectory, up to the turn that rewrites it, and the steps in it."""

    ids: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    """Positions in ``ids`` of the tokens that end a step."""
    places: list[tuple[int, int]] = field(default_factory=list)
    """The same tokens as (turn, token in turn)."""
    images: tuple[Image, ...] = ()


def contexts(trajectory: Trajectory, ends: StepEnds) -> list[Context]:
    """The contexts, in order. A turn that rewrites the context (``fresh``) starts a new one.

    Steps are found in sampled turns only, in each turn separately, because only the policy's own text gets credit. A
    token that ends two steps appears once.
    """
    all_contexts: list[Context] = []
    for number, turn in enumerate(trajectory.turns):
        if turn.fresh or not all_contexts:
            all_contexts.append(Context())
        context = all_contexts[-1]
        if turn.sampled:
            for token in dict.fromkeys(ends(turn.ids)):
                context.positions.append(len(context.ids) + token)
                context.places.append((number, token))
        context.images += tuple(image.moved(len(context.ids)) for image in turn.images)
        context.ids += turn.ids
    return all_contexts


def close_last_step(
    all_contexts: Sequence[Context], trajectory: Trajectory, ends: StepEnds, separator_ids: Sequence[int]
) -> None:
    """Add the step that the trajectory's last turn leaves open: the last context ends with its text, without the end
    token, and with the separator. The step's place is its last token."""
    if not trajectory.turns:
        return
    number, turn = len(trajectory.turns) - 1, trajectory.turns[-1]
    if not turn.sampled or ends.count(turn.text + ends.separator) == ends.count(turn.text):
        return
    # decode() keeps special tokens and the turn's text does not, so they differ if the turn ends with an end token.
    end = len(turn.ids) - (ends.decode(turn.ids) != turn.text)
    context, place = all_contexts[-1], (number, end - 1)
    if end and place not in context.places:
        context.ids = [*context.ids[: len(context.ids) - len(turn.ids) + end], *separator_ids]
        context.positions.append(len(context.ids) - 1)
        context.places.append(place)


def last_token(trajectory: Trajectory) -> list[Context]:
    """The context with the last sampled token, as if a single step ended there; empty if nothing was sampled."""
    sampled = [n for n, turn in enumerate(trajectory.turns) if turn.sampled and turn.ids]
    if not sampled:
        return []
    last = sampled[-1]
    start = max((n for n, turn in enumerate(trajectory.turns[: last + 1]) if turn.fresh), default=0)
    turns = trajectory.turns[start : last + 1]
    ids = [i for turn in turns for i in turn.ids]
    images = joined_images((len(turn.ids), turn.images) for turn in turns)
    return [Context(ids, [len(ids) - 1], [(last, len(trajectory.turns[last].ids) - 1)], images)]


def head_of(settings: dict[str, Any], model: str) -> str:
    """``classes:2`` | ``lm``. Raises ModelError for a classification model with another number of labels."""
    if not any("Classification" in name for name in settings.get("architectures") or ()):
        return "lm"
    labels = len(settings.get("id2label") or {0: "", 1: ""})  # transformers writes none if there are two
    if labels != 2:
        raise ModelError(
            f"reward 'prm': {model!r} has {labels} labels; a process reward model has 2 (0 wrong, 1 right), or is a "
            "language model with two label tokens. For a model with one output use --reward model:PATH"
        )
    return CLASSES


def label_ids(settings: dict[str, Any]) -> tuple[int, int] | None:
    """(right, wrong): ids of the label tokens, which training wrote there; None if they are absent."""
    right, wrong = settings.get(RIGHT_TOKEN), settings.get(WRONG_TOKEN)
    return (right, wrong) if isinstance(right, int) and isinstance(wrong, int) else None


def separator_of(settings: dict[str, Any], model: str, separator: str | None) -> str:
    """The text that ends a step: the text that training wrote to ``config.json``, else ``separator``, else a line
    break.

    Raises ConfigError if both exist and differ, because the model was not trained to be read after that separator.
    """
    trained = settings.get(STEP_SEPARATOR)
    if not isinstance(trained, str) or not trained:
        return "\n" if separator is None else separator
    if separator is not None and separator != trained:
        raise ConfigError(
            f"reward 'prm': separator = {separator!r}, but {model!r} was trained on steps that end with {trained!r} "
            f"({STEP_SEPARATOR} in its config.json), and was not trained to be read after other text. Remove "
            "separator, or train a model on such steps with data.step_separator."
        )
    return trained
