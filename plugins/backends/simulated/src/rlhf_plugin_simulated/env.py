"""The environment ``simulated``: answers after a delay."""

from __future__ import annotations

import asyncio
import random
from typing import Annotated

from pydantic import Field
from rlhf.interfaces import ComponentConfig, Env
from rlhf.types import EnvStep, Row

from rlhf_plugin_simulated.delays import log_normal


class SimulatedEnvConfig(ComponentConfig):
    turns: Annotated[int, Field(gt=0)] = 4
    """Steps of an episode."""
    delay: Annotated[float, Field(gt=0)] = 0.5
    """Mean seconds of a step."""
    delay_sigma: Annotated[float, Field(ge=0)] = 0.5
    """Standard deviation of the logarithm of the delay; 0: every delay is the mean."""
    slow_share: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of the steps that take ``slow`` seconds instead."""
    slow: Annotated[float, Field(gt=0)] = 5.0
    """Seconds of a slow step."""
    speed: Annotated[float, Field(gt=0)] = 1.0
    """Simulated seconds per second."""


class SimulatedEnv(Env):
    """Each step takes a random time. The last step gives a random reward, 0 or 1. Both depend on the episode's seed and
    the previous actions."""

    name = "simulated"
    Config = SimulatedEnvConfig
    conformance = {"configs": (SimulatedEnvConfig(speed=100.0),)}
    """Config for ``rlhf plugins check``, which would otherwise wait for every simulated second."""

    async def reset(self, row: Row, seed: int) -> str:
        self._draw = random.Random(seed)
        self._steps = 0
        return ""

    async def step(self, action: str) -> EnvStep:
        config: SimulatedEnvConfig = self.config
        delay = log_normal(self._draw, config.delay, config.delay_sigma)
        if self._draw.random() < config.slow_share:
            delay = config.slow
        await asyncio.sleep(delay / config.speed)
        self._steps += 1
        done = self._steps >= config.turns
        reward = float(random.Random(f"{self._draw.random()} {action}").random() < 0.5) if done else 0.0
        return EnvStep("" if done else "more", reward, done)
