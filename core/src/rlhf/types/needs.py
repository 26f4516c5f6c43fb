"""The data, models and samples that an algorithm needs, and the run options that it receives."""

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
    """Role ``borrower`` computes with the output head of role ``role`` (:attr:`Head.lenders`), a frozen language model.
    The head is copied to ``borrower`` once, after the models are loaded."""

    role: str
    borrower: str = "policy"


@dataclass(frozen=True, slots=True)
class Needs:
    """The requirements of an algorithm, computed from its config."""

    roles: tuple[RoleSpec, ...]
    group_min: int = 1
    """Smallest number of samples per prompt. If it is above 1, ``sampling.samples_per_prompt`` is 8 by default."""
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
    the answer in the data (:attr:`Turn.is_demonstration`) instead of samples. The run's seed and the group number
    select the rows. Their groups are neither scored nor filtered."""
    loans: tuple[Lent, ...] = ()
    demonstration_sources: tuple[str, ...] = ()
    """Data form ``prompts``: sources of ``data.train`` whose rows are demonstrations. The group of such a row is one
    trajectory with the answer in the data, as with :attr:`demonstration_share`. Other groups are sampled and scored."""
    greedy: bool = False
    """Data form ``prompts``, with a reward: each prompt also gets a greedy answer (temperature 0). It is scored with
    the samples but is not part of the group. Its reward is ``rollout/greedy_reward`` in :attr:`Trajectory.info` of each
    sample. If it fails or gets no reward, the samples fail."""

    demonstrations_per_group: int = 0
    """Data form ``prompts``, with a reward: this number of first samples of each group, fewer than
    ``sampling.samples_per_prompt``, are the answer in the data (:attr:`Turn.is_demonstration`). They are scored and
    filtered with the others."""

    @property
    def answered(self) -> bool | tuple[str, ...]:
        """Rows that need an answer: True for all of ``data.train``, else those of these sources."""
        return self.demonstration_share > 0 or self.demonstrations_per_group > 0 or self.demonstration_sources


@dataclass(frozen=True, slots=True)
class RunOptions:
    """Options outside of ``[algorithm]`` that an algorithm needs to lay out batches."""

    max_tokens: int | None = None
    """``data.max_tokens``. No row and no sample is longer. Sequences that an algorithm creates must not be longer
    either. None: no limit."""
    step_sources: Mapping[str, float] = field(default_factory=dict)
    """{reward source with ``credit = "step"``: its weight}. An algorithm on prompts passes it to
    :func:`rlhf.ops.trajectories.assemble`."""
    sources: tuple[str, ...] = ()
    """Names of the sources in ``data.train`` (:attr:`Row.source`). Empty: unknown, outside of a run."""
    weights: Mapping[str, float] = field(default_factory=dict)
    """{reward source: its weight}, with ``env`` for the rewards of an environment's turns. Sources with ``credit =
    "step"`` are not in it."""
    teachers: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """{reward source that returns log-probs of a teacher (:attr:`Reward.is_teacher`): data sources whose rows it
    scores, empty: all}. They are in none of the fields above."""


@dataclass(frozen=True, slots=True)
class OnlineShape:
    """Upper bounds of the batches and answers of an online run."""

    trajectories: int
    """Largest number in a batch: ``data.batch_size`` times ``sampling.samples_per_prompt``, times the agents that the
    policy plays in the environment (:meth:`~rlhf.interfaces.Env.agents`)."""
    answer_tokens: int
    """Largest number of tokens that the policy can sample for one answer: ``sampling.max_new_tokens``, times the turns
    in an environment, at most ``data.max_tokens``."""
    most_tokens: int
    """Upper bound of the tokens that the policy samples for one answer, for every rollout."""
    observations: bool = True
    """Whether a sample can have observations: replies of an environment or a tool between two answers of the policy."""
    temperature: float = 1.0
    """``sampling.temperature``."""
    turn_rewards: bool = False
    """Whether turns get rewards: from the environment, or from the rollout
    (:attr:`~rlhf.interfaces.Rollout.gives_rewards`)."""
