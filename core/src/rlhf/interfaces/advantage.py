"""Advantage estimators: rewards and values become credit per action token."""

from __future__ import annotations

import inspect
from abc import abstractmethod
from typing import TYPE_CHECKING, ClassVar, Literal

from rlhf.interfaces.component import Component

if TYPE_CHECKING:
    from torch import Tensor


class Advantage(Component):
    """Two pure functions of the stages between reward and advantage (``rlhf_algorithms.pipeline``).

    Every trajectory is compressed to its own action tokens before :meth:`returns` is called, so prompt and environment
    tokens do not exist here: they neither discount nor decay. Complete example::

        class Centered(Advantage):
            name = "centered"
            group_min = 2

            def baseline(self, r_N, group_N):
                return r_N - group_mean(r_N, group_N)          # rlhf.ops.groups

            def returns(self, R_NA, mask_NA, values_NA, boot_N):
                adv_NA = return_to_go(R_NA, mask_NA, gamma=1.0)  # rlhf.ops.returns
                return adv_NA, adv_NA
    """

    group_min: ClassVar[int] = 1
    """Smallest number of samples per prompt for which the estimator is defined."""

    @property
    def needs_values(self) -> bool:
        """Whether :meth:`returns` reads values (a critic is needed)."""
        return False

    @property
    def token_rewards(self) -> bool:
        """Whether rewards at single tokens are compared like any other. Default: where there is no baseline over
        groups, as that is over sums of whole trajectories, and rewards at tokens would lie outside of it."""
        return type(self).baseline is Advantage.baseline

    @property
    def normalise(self) -> Literal["none", "center", "whiten"]:
        """What is done to the advantages of the whole rollout batch, weighted by tokens."""
        return "none"

    def baseline(self, r_N: Tensor, group_N: Tensor) -> Tensor:
        """Subtract or scale by a statistic of the group.

        Args:
            r_N: float64 [N], one combined and shaped reward per trajectory.
            group_N: int64 [N], which group each trajectory is in.

        An override that needs lengths (OPO's baseline weighs rewards by them) takes a third argument of this name and
        gets it: ``def baseline(self, r_N, group_N, own_tokens_N=None)``, int64 [N], the tokens that the policy sampled
        in each trajectory, or that the data gave as its answer. In :meth:`returns` they are ``mask_NA.sum(1)``.

        Returns: float64 [N].
        """
        return r_N

    @abstractmethod
    def returns(
        self, R_NA: Tensor, mask_NA: Tensor, values_NA: Tensor | None, boot_N: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Credit over own action tokens, left-aligned and right-padded.

        Args:
            R_NA: float32 [N, A] token rewards, zero where masked.
            mask_NA: bool [N, A].
            values_NA: float32 [N, A] or None, zero where masked.
            boot_N: float32 [N] or None, value after the last token of truncated samples.

        Returns: (advantages [N, A], returns [N, A]); masked positions are ignored.
        """


def baseline_of(advantage: Advantage, r_N: Tensor, group_N: Tensor, own_tokens_N: Tensor) -> Tensor:
    """:meth:`Advantage.baseline`, called with ``own_tokens_N`` (int64 [N]) where it has an argument of this name."""
    if "own_tokens_N" in inspect.signature(advantage.baseline).parameters:
        return advantage.baseline(r_N, group_N, own_tokens_N=own_tokens_N)  # type: ignore[call-arg]
    return advantage.baseline(r_N, group_N)
