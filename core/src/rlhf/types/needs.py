"""The data, models and samples that an algorithm needs, and the options of the run that it is given."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

GREEDY_REWARD = "rollout/greedy_reward"
"""Key of :attr:`Trajectory.info`: the reward of the greedy answer to the same prompt (:attr:`Needs.greedy`)."""

DataForm = Literal["prompts", "demonstrations", "pairs", "labels", "steps"]


@dataclass(frozen=True, slots=True)
class RoleSpec:
    """A model that a run holds: the policy, a critic, a reference, a reward model."""

    name: str
    head: str = "lm"
    """``lm`` | ``scalar`` | ``classes:N``."""
    trained: bool = False
    like: str | None = None
    """Start from this role's model if the run file names none."""
    model: str | None = None
    """Path or hub name, if the declaring plugin knows it (from an option of a reward plugin)."""


@dataclass(frozen=True, slots=True)
class Lent:
    """Role ``borrower`` computes with the output head of role ``role`` (:attr:`Head.lenders`), a language model that is
    not trained. The head is copied to ``borrower`` once, after the models are loaded."""

    role: str
    borrower: str = "policy"


@dataclass(frozen=True, slots=True)
class Needs:
    """The requirements of an algorithm, computed from its config."""

    roles: tuple[RoleSpec, ...]
    group_min: int = 1
    generator_logprobs: bool = False
    features: tuple[str, ...] = ()
    """``correction``: the loss corrects for samples from another distribution than the policy's. ``teachers``: the
    algorithm reads the log-probs of :attr:`RunOptions.teachers`."""
    rows_min: int = 1
    """Smallest ``data.batch_size``."""
    reward: bool = True
    """Data form ``prompts``: False if the algorithm learns from samples without a reward. ``assemble`` gets them with
    ``Trajectory.reward = None``."""
    demonstration_share: float = 0.0
    """Data form ``prompts``, without a reward: share of the rows, from 0 to below 1, whose group is one trajectory with
    the answer in the data (:attr:`Turn.is_demonstration`) instead of samples. The run's seed and the group's number
    decide which rows. Their groups are neither scored nor filtered."""
    loans: tuple[Lent, ...] = ()
    demonstration_sources: tuple[str, ...] = ()
    """Data form ``prompts``: sources of ``data.train`` whose rows are demonstrations. The group of such a row is one
    trajectory with the answer in the data, as with :attr:`demonstration_share`, beside groups that are sampled and
    scored."""
    greedy: bool = False
    """Data form ``prompts``, with a reward: each prompt also gets a greedy answer (temperature 0). It is scored with
    the samples and is no part of the group. Its reward is ``rollout/greedy_reward`` in :attr:`Trajectory.info` of each
    sample. Where it fails or gets no reward, the samples fail."""

    demonstrations_per_group: int = 0
    """Data form ``prompts``, with a reward: the first so many samples of each group are the answer in the data
    (:attr:`Turn.is_demonstration`), fewer than ``sampling.samples_per_prompt``. They are scored and filtered with the
    others."""

    @property
    def answered(self) -> bool | tuple[str, ...]:
        """Rows that need an answer: True: all of ``data.train``; else those of these sources."""
        return self.demonstration_share > 0 or self.demonstrations_per_group > 0 or self.demonstration_sources


@dataclass(frozen=True, slots=True)
class RunOptions:
    """Options outside of ``[algorithm]`` that an algorithm needs to lay out batches."""

    max_tokens: int | None = None
    """``data.max_tokens``. No row and no sample is longer; sequences that an algorithm makes itself must not be longer
    either. None: no limit."""
    step_sources: Mapping[str, float] = field(default_factory=dict)
    """{reward source with ``credit = "step"``: its weight}. An algorithm on prompts passes it to
    :func:`rlhf.ops.trajectories.assemble`."""
    sources: tuple[str, ...] = ()
    """Names of the sources in ``data.train`` (:attr:`Row.source`). Empty: not known, outside of a run."""
    weights: Mapping[str, float] = field(default_factory=dict)
    """{reward source: its weight}, with ``env`` for the rewards of an environment's turns. Sources with ``credit =
    "step"`` are not in it."""
    teachers: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """{reward source that gives log-probs of a teacher (:attr:`Reward.is_teacher`): data sources whose rows it scores,
    empty: all}. They are in none of the above."""


@dataclass(frozen=True, slots=True)
class OnlineShape:
    """How large batches and answers of an online run can get."""

    trajectories: int
    """Most in a batch: ``data.batch_size`` times ``sampling.samples_per_prompt``, times the agents that the policy
    plays in the environment (:meth:`~rlhf.interfaces.Env.agents`)."""
    answer_tokens: int
    """Largest number of tokens that the policy can sample for one answer: ``sampling.max_new_tokens``, times the turns
    in an environment, at most ``data.max_tokens``."""
    most_tokens: int
    """Upper bound of the tokens that the policy samples for one answer, for every rollout."""
    observations: bool = True
    """Whether a sample can have observations: what an environment or a tool says between two answers of the policy."""
    temperature: float = 1.0
    """``sampling.temperature``."""
