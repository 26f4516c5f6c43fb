"""Mean and standard deviation of a reward model's scores. The reward that uses the model can normalise by them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(slots=True)
class Moments:
    """Running averages of a score and its square.

    Exponential moving averages: a step's averages have weight 1 - ``decay``, and earlier ones are multiplied by
    ``decay``. The sums are divided by the sum of the weights, which removes the bias of the first steps, as in Adam.
    """

    decay: float
    weight: float = 0.0
    first: float = 0.0
    second: float = 0.0

    def add(self, mean: float, square: float) -> None:
        """One step's mean score and mean squared score."""
        self.weight = self.decay * self.weight + (1 - self.decay)
        self.first = self.decay * self.first + (1 - self.decay) * mean
        self.second = self.decay * self.second + (1 - self.decay) * square

    @property
    def known(self) -> bool:
        return self.weight > 0

    def figures(self) -> dict[str, float]:
        """``mean`` and ``std`` (population); empty before the first step."""
        return figures(self.first / self.weight, self.second / self.weight) if self.known else {}

    def state_dict(self) -> dict[str, float]:
        return {name: value for name, value in asdict(self).items() if name != "decay"}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.weight, self.first, self.second = (float(state[name]) for name in ("weight", "first", "second"))


def figures(mean: float, square: float) -> dict[str, float]:
    """``mean`` and ``std`` from the mean and the mean square."""
    return {"mean": mean, "std": math.sqrt(max(0.0, square - mean * mean))}
