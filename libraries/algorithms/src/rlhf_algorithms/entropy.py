"""Controller of the entropy bonus: its coefficient follows the entropy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlhf_algorithms.policy_gradient_config import EntropyConfig


class EntropyController:
    """The bonus is on if the last step's entropy was at or below the target. Its coefficient then rises by ``step``,
    otherwise it falls. It stays within [0, ``high``] (He et al. 2025, Skywork-OR1, arXiv:2505.22312, section 4.2).

    Deviations: (1) The coefficient changes once per step of the run, by the mean entropy of its optimizer steps; TRL
    changes it at each optimizer step. (2) The first step has the bonus.
    """

    def __init__(self, config: EntropyConfig, start: float) -> None:
        """``start``: ``loss.entropy_coef``, which the loss multiplies by :attr:`factor`."""
        self.config, self.start = config, start
        self.coef, self.on = start, True

    @property
    def adaptive(self) -> bool:
        return self.config.target is not None

    @property
    def factor(self) -> float:
        """The coefficient of the next update as a multiple of ``start``."""
        return self.coef / self.start if self.on else 0.0

    def update(self, entropy: float) -> None:
        assert self.config.target is not None
        self.on = entropy <= self.config.target
        step = self.config.step if self.on else -self.config.step
        self.coef = min(max(self.coef + step, 0.0), self.config.high)

    def state_dict(self) -> dict[str, Any]:
        return {"coef": self.coef, "on": self.on}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.coef, self.on = float(state["coef"]), bool(state["on"])
