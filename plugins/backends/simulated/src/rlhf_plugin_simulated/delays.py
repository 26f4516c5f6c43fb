"""Random durations and lengths."""

from __future__ import annotations

import math
import random


def log_normal(draw: random.Random, mean: float, sigma: float) -> float:
    """A draw from the log-normal distribution with this mean.

    Args:
        mean: > 0, of the distribution itself.
        sigma: >= 0, standard deviation of the logarithm; 0 gives ``mean``.
    """
    return math.exp(draw.gauss(math.log(mean) - sigma * sigma / 2, sigma))
