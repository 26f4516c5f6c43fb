"""Generators and requests of the tests."""

from __future__ import annotations

import asyncio
import random
from array import array
from collections.abc import Callable, Coroutine
from typing import Any

from rlhf.interfaces import GeneratorSpec
from rlhf.types import GenerationRequest, Sampling
from rlhf_plugin_simulated.pool import SimulatedPool


def make(in_flight: Any = "continue", seed: int = 0, **options: Any) -> SimulatedPool:
    """8 tokens a second and 80 tokens an answer, where nothing else is said. No time is rounded."""
    config = SimulatedPool.Config(**{"tokens": 80.0, "tokens_sigma": 0.0, "tokens_per_second": 8.0, **options})
    return SimulatedPool(config, GeneratorSpec((1,), str, in_flight=in_flight, seed=seed))


def request(seed: int, max_new_tokens: int = 1000) -> GenerationRequest:
    return GenerationRequest(array("i", [5, 6]), seed, Sampling(max_new_tokens=max_new_tokens))


def play(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run the scenario. The limit is on real seconds and is not reached: every simulated second passes at once."""
    asyncio.run(asyncio.wait_for(scenario(), 60))


def dies_once() -> int:
    """A seed with which the first of two tries fails at a share of deaths of 0.5."""
    return next(seed for seed in range(100) if (draw := random.Random(seed)).random() < 0.5 <= draw.random())
