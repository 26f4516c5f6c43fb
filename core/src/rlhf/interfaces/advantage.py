"""Advantage estimators: compute an advantage per action token from rewards and values."""

from __future__ import annotations

import inspect
from abc import abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, Literal

from rlhf.interfaces.component import Component

if TYPE_CHECKING:
    from torch import Tensor


class Advantage(Component):
    """Two pure functions, used by the stages between reward and advantage (``rlhf_algorithms.pipeline``).

    :meth:`returns` gets only the action tokens of every trajectory. Prompt and environment tokens are removed before,
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
    """Smallest number of samples per prompt for which the estimator is defined. It may follow from the options: set
    ``self.group_min`` in ``__init__``."""

    over_batch: ClassVar[bool] = False
    """Whether the baseline is of the whole rollout batch on purpose, so that the credit of a group depends on which
    other prompts share its batch."""

    @property
    def needs_values(self) -> bool:
        """Whether :meth:`returns` reads values (a critic is needed)."""
        return False

    @property
    def token_rewards(self) -> bool:
        """Whether the estimator supports rewards at single tokens. Default: only without a baseline over groups,
        because that baseline is computed from one sum per trajectory, which does not include rewards at single
        tokens."""
        return type(self).baseline is Advantage.baseline

    @property
    def normalise(self) -> Literal["none", "center", "whiten"]:
        """Normalisation of the advantages over the whole rollout batch, weighted by tokens."""
        return "none"

    def baseline(self, r_N: Tensor, group_N: Tensor) -> Tensor:
        """Subtract or scale by a statistic of the group.

        Args:
            r_N: float64 [N], one combined and shaped reward per trajectory.
            group_N: int64 [N], which group each trajectory is in.

        An override that needs lengths (OPO's baseline weighs rewards by them) may take a third argument:
        ``def baseline(self, r_N, group_N, own_tokens_N=None)``, int64 [N], the number of tokens that the policy sampled
        in each trajectory, or of the given answer. In :meth:`returns` this number is ``mask_NA.sum(1)``.

        An override that treats each reward source by itself (GDPO) may take ``sources=None``: {reward source: (its
        weight, its values)}, float64 [N], NaN where it gave none. Options that change ``r_N`` are then refused.

        Returns: float64 [N].
        """
        return r_N

    @abstractmethod
    def returns(
        self, R_NA: Tensor, mask_NA: Tensor, values_NA: Tensor | None, boot_N: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Advantages and returns of the action tokens, left-aligned and right-padded.

        A large batch comes in several calls, each with some of its trajectories: every row stands alone.

        Args:
            R_NA: float32 [N, A] token rewards, zero where masked.
            mask_NA: bool [N, A].
            values_NA: float32 [N, A] or None, zero where masked.
            boot_N: float32 [N] or None, value after the last token of truncated samples.

        Returns: (advantages [N, A], returns [N, A]); masked positions are ignored.
        """


Sources = Mapping[str, tuple[float, "Tensor"]]
"""{reward source: (weight, values [N])}."""


def reads_sources(advantage: Advantage) -> bool:
    """Whether :meth:`Advantage.baseline` treats each reward source by itself."""
    return "sources" in inspect.signature(advantage.baseline).parameters


def baseline_of(
    advantage: Advantage, r_N: Tensor, group_N: Tensor, own_tokens_N: Tensor, sources: Sources | None = None
) -> Tensor:
    """Call :meth:`Advantage.baseline`, with ``own_tokens_N`` (int64 [N]) and ``sources`` if it has such arguments."""
    optional = {"own_tokens_N": own_tokens_N, "sources": sources}
    parameters = inspect.signature(advantage.baseline).parameters
    return advantage.baseline(r_N, group_N, **{name: value for name, value in optional.items() if name in parameters})
