"""Environments: episodes of several turns."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Awaitable

from rlhf.interfaces.component import Component
from rlhf.types import EnvStep, Row, Sampling


class Env(Component):
    """One instance is one episode; it is built fresh for every sample and always closed. Methods are all
    ``async def`` (event loop) or all plain ``def`` (a worker process of its own, killed at its deadline).
    With equal row, seed and actions an environment answers equally. Complete example::

        class Echo(Env):
            name = "echo"

            async def reset(self, row, seed):
                return "Say 'yes'."

            async def step(self, action):
                return EnvStep(reward=float(action == "yes"), done=True)
    """

    sampling: Sampling | None = None
    """How the policy's turns are sampled now; the rollout sets it before ``reset`` and before every ``step``. Frozen,
    and each episode's own: an environment changes it by ``EnvStep(sampling=replace(self.sampling, ...))``."""

    @abstractmethod
    def reset(self, row: Row, seed: int) -> str | Awaitable[str]:
        """Start the episode; the text returned is shown to the policy after the row's prompt ("" for nothing)."""

    @abstractmethod
    def step(self, action: str) -> EnvStep | Awaitable[EnvStep]:
        """Answer the policy's turn (decoded, special tokens left out)."""

    def close(self) -> Awaitable[None] | None:
        """Free what the episode holds; called exactly once, also after an error."""
        return None
