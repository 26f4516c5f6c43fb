"""Advantage estimators: compute an advantage per action token from rewards and values."""

from __future__ import annotations

import inspect
from abc import abstractmethod
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from rlhf.interfaces.component import Component

if TYPE_CHECKING:
    from torch import Tensor


class Advantage(Component):
    """Pure functions, used by the stages between reward and advantage (``rlhf_algorithms.pipeline``).

    :meth:`returns` gets only the action tokens of every trajectory. Prompt and environment tokens are already removed,
    so they neither discount nor decay. Complete example::

        class Centered(Advantage):
            name = "centered"
            group_min = 2

            def baseline(self, r_N, group_N):
                return r_N - group_mean(r_N, group_N)          # rlhf.ops.groups

            def returns(self, R_NA, mask_NA, values_NA, boot_N):
                adv_NA = return_to_go(R_NA, mask_NA, gamma=1.0)  # rlhf.ops.returns
                return adv_NA, adv_NA
    """

    group_min: int = 1
    """Smallest number of samples per prompt for which the estimator is defined. If it depends on the options, set
    ``self.group_min`` in ``__init__``."""

    over_batch: ClassVar[bool] = False
    """Whether the baseline deliberately covers the whole rollout batch, so that the credit of a group depends on the
    other prompts in its batch."""

    @property
    def needs_values(self) -> bool:
        """Whether :meth:`returns` reads values (a critic is needed)."""
        return False

    @property
    def token_rewards(self) -> bool:
        """Whether the estimator supports rewards at single tokens. Default: only without a group baseline, because that
        baseline is computed from one sum per trajectory, which does not include rewards at single tokens."""
        return type(self).baseline is Advantage.baseline

    @property
    def normalise(self) -> Literal["none", "center", "whiten"]:
        """Normalisation of the advantages over the whole rollout batch, weighted by tokens. Default: the option
        ``normalise``, or none without such an option."""
        return getattr(self.config, "normalise", "none")

    def baseline(self, r_N: Tensor, group_N: Tensor) -> Tensor:
        """Subtract or scale by a statistic of the group.

        Args:
            r_N: float64 [N], one combined and shaped reward per trajectory.
            group_N: int64 [N], the group of each trajectory. If the policy plays several agents, a group holds the
                trajectories of one agent, which may be fewer than the samples.

        An override may take further arguments, by name and with the default None, as in
        ``def baseline(self, r_N, group_N, own_tokens_N=None)``. The run then provides

        * ``own_tokens_N``: int64 [N], the number of tokens that the policy sampled in each trajectory, or those of the
          given answer. In :meth:`returns` this number is ``mask_NA.sum(1)``.
        * ``sources``: {reward source: (weight, values)}, float64 [N], NaN for a missing value, for a baseline that
          treats each reward source separately. Options that change ``r_N`` are refused.
        * ``greedy_N``: float64 [N], the reward of a greedy answer to the same prompt. One is drawn for each prompt in
          addition to its samples. It is scored with them but not trained on.
        * ``key_N``: int64 [N], for running statistics. It is equal for trajectories of one agent whose rows come from
          one source and have equal values in :meth:`columns`. The run calls :meth:`update_statistics`.
        * ``sample_N``: int64 [N], the number of each trajectory in its group. Groups are numbered in the order in which
          they were started, so (group, sample) is an order.

        Returns: float64 [N].
        """
        return r_N

    def columns(self) -> Collection[str]:
        """Data columns that ``key_N`` depends on besides the source, according to the options. A run is refused if no
        row of a source has such a column."""
        return ()

    def update_statistics(self, r_N: Tensor, group_N: Tensor, key_N: Tensor, sample_N: Tensor) -> None:
        """Update running statistics with the rewards of a step. If :meth:`baseline` takes ``key_N``, this is called
        once per step, after the updates, with the same values. The statistics belong in ``state_dict``."""

    def turn_credit(self, reward_M: Tensor, state_M: Tensor, trajectory_M: Tensor) -> Tensor:
        """Further credit of single turns, which is added to each of their tokens. M: turns with tokens that the policy
        sampled, trajectory by trajectory and in order. Called only if it is overridden. A run with single-turn answers
        is then refused.

        Args:
            reward_M: float64, the turn's reward from the environment or the rollout. The last turn of a trajectory also
                has the rest of the trajectory's reward ``r``, so that the sum over its turns is ``r``.
            state_M: int64, equal for turns of one group that follow the same observation (its text and images).
            trajectory_M: int64, the trajectory of each turn.

        Returns: float64 [M].
        """
        raise NotImplementedError

    @abstractmethod
    def returns(
        self, R_NA: Tensor, mask_NA: Tensor, values_NA: Tensor | None, boot_N: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Advantages and returns of the action tokens, left-aligned and right-padded.

        A large batch is split over several calls by trajectory, so every row must be computed by itself.

        Args:
            R_NA: float32 [N, A] token rewards, zero where masked.
            mask_NA: bool [N, A].
            values_NA: float32 [N, A] or None, zero where masked.
            boot_N: float32 [N] or None, value after the last token of truncated samples.

        Returns: (advantages [N, A], returns [N, A]); masked positions are ignored.
        """


Sources = Mapping[str, tuple[float, "Tensor"]]
"""{reward source: (weight, values [N])}."""


def reads(advantage: Advantage, name: str) -> bool:
    """Whether :meth:`Advantage.baseline` takes the argument ``name``."""
    return name in inspect.signature(advantage.baseline).parameters


def reads_turns(advantage: Advantage) -> bool:
    """Whether the estimator gives credit to single turns."""
    return type(advantage).turn_credit is not Advantage.turn_credit


def baseline_of(advantage: Advantage, r_N: Tensor, group_N: Tensor, **arguments: Any) -> Tensor:
    """Call :meth:`Advantage.baseline` with the ``arguments`` that it takes."""
    return advantage.baseline(r_N, group_N, **{n: v for n, v in arguments.items() if reads(advantage, n)})
