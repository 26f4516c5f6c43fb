"""What an algorithm needs of a run before its first step: data, models, samples; and how large batches can get."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

DataForm = Literal["prompts", "demonstrations", "pairs", "labels", "steps"]


@dataclass(frozen=True, slots=True)
class RoleSpec:
    """A model that a run holds: the policy, a critic, a reference, a reward model."""

    name: str
    head: str = "lm"
    """``lm`` | ``scalar`` | ``classes:N``."""
    trained: bool = False
    like: str | None = None
    """Start from this role's model where the run file names none."""
    model: str | None = None
    """Path or hub name, where the declaring plugin knows it (a reward plugin's own option)."""


@dataclass(frozen=True, slots=True)
class Lent:
    """Role ``to`` computes with the output head of role ``role`` (:attr:`Head.lent`), a language model that is not
    trained. It is handed over once, after the models are loaded."""

    role: str
    to: str = "policy"


@dataclass(frozen=True, slots=True)
class Needs:
    """What an algorithm cannot do without, as a function of its config."""

    roles: tuple[RoleSpec, ...]
    group_min: int = 1
    generator_logprobs: bool = False
    features: tuple[str, ...] = ()
    rows_min: int = 1
    """Smallest ``data.batch_size``."""
    reward: bool = True
    """Data form ``prompts``: False where it learns from samples that nobody scored; they reach ``assemble`` with
    ``Trajectory.reward = None``."""
    given: float = 0.0
    """Data form ``prompts``, without a reward: share of the rows, from 0 to below 1, whose group is one trajectory with
    the row's own answer (:attr:`Turn.given`) in place of samples. Which rows is a function of the run's seed and the
    group's number. They are neither scored nor filtered."""
    lent: tuple[Lent, ...] = ()


@dataclass(frozen=True, slots=True)
class OnlineShape:
    """How large batches and answers of an online run can get."""

    trajectories: int
    """Of a whole batch: ``data.batch_size`` times ``sampling.samples_per_prompt``."""
    answer_tokens: int
    """Own tokens that an answer can have: ``sampling.max_new_tokens``, times the turns in an environment, within
    ``data.max_tokens``."""
    most_tokens: int
    """Own tokens that no answer exceeds, whatever the rollout does."""
