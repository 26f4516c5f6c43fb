"""A clock that tests set, so that simulated times are exact and nothing is waited for."""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from rlhf_plugin_simulated import env, generator, pool, trainer

sys.path.insert(0, str(Path(__file__).parent))  # for generator_cases


class Clock:
    """Stands for the modules ``time`` and ``asyncio`` in the plugin. Time passes in :meth:`pass_` and in blocking
    sleeps only. Durations should be sums of powers of two, so that no sum of them is rounded."""

    def __init__(self) -> None:
        self.now = 0.0
        self._sleeping: list[tuple[float, asyncio.Future[None]]] = []

    def monotonic(self) -> float:
        return self.now

    def block(self, seconds: float) -> None:
        """``time.sleep``."""
        self.now += seconds

    async def sleep(self, seconds: float) -> None:
        """``asyncio.sleep``."""
        if seconds > 0:
            woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._sleeping.append((self.now + seconds, woken))
            await woken

    async def pass_(self, seconds: float) -> None:
        """Let time pass. Sleepers wake in order, each before any later one."""
        end = self.now + seconds
        await settled()
        while due := [sleeper for sleeper in self._sleeping if sleeper[0] <= end]:
            first = min(due, key=lambda sleeper: sleeper[0])
            self._sleeping.remove(first)
            self.now = first[0]
            first[1].cancelled() or first[1].set_result(None)
            await settled()
        self.now = end


async def settled() -> None:
    """Every task that can go on has gone on. Their awaits are at most a few deep."""
    for _ in range(50):
        await asyncio.sleep(0)


class Replaced(ModuleType):
    """A module some of whose functions are replaced."""

    def __init__(self, module: ModuleType, **functions: Any) -> None:
        super().__init__(module.__name__)
        self.__dict__.update(vars(module))
        self.__dict__.update(functions)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    instance = Clock()
    for module in (env, pool):
        monkeypatch.setattr(module, "asyncio", Replaced(asyncio, sleep=instance.sleep))
    for module in (generator, pool, trainer):
        monkeypatch.setattr(module, "time", Replaced(time, monotonic=instance.monotonic, sleep=instance.block))
    return instance
