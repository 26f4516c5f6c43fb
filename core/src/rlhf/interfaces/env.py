"""Environments: episodes of several turns."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Awaitable

from rlhf.interfaces.component import Component
from rlhf.types import EnvStep, Row, Sampling


class Env(Component):
    """One instance is one episode. The runtime builds a new instance for every sample and always closes it. Methods are
    all ``async def`` (run on the event loop) or all plain ``def`` (run in a worker process, which is killed at the
    deadline). With equal row, seed and actions an environment must give equal answers, also in another worker process:
    all of them have one ``PYTHONHASHSEED``, so sets of texts have one order. Complete example::

        class Echo(Env):
            name = "echo"

            async def reset(self, row, seed):
                return "Say 'yes'."

            async def step(self, action):
                return EnvStep(reward=float(action == "yes"), done=True)
    """

    sampling: Sampling | None = None
    """Current sampling parameters of this episode. The rollout sets them before ``reset`` and before every ``step``.
    They are frozen; an environment changes them by ``EnvStep(sampling=replace(self.sampling, ...))``."""

    @abstractmethod
    def reset(self, row: Row, seed: int) -> str | Awaitable[str]:
        """Start the episode. Returns the text that follows the row's prompt ("" for none)."""

    @abstractmethod
    def step(self, action: str) -> EnvStep | Awaitable[EnvStep]:
        """Answer the policy's turn ``action`` (decoded text without special tokens)."""

    def close(self) -> Awaitable[None] | None:
        """Release the resources of the episode. Called exactly once, also after an error."""
        return None
