"""Environments: episodes of several turns."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Awaitable, Sequence
from typing import Any

from rlhf.interfaces.component import Component
from rlhf.types import EnvStep, Row, Sampling


class Env(Component):
    """One instance is one episode. The runtime builds a new instance for every sample and always closes it. Methods are
    all ``async def`` (run on the event loop) or all plain ``def`` (run in a worker process, which is killed at the
    deadline). With equal row, seed and actions an environment must give equal answers, also in another worker process.
    All workers have the same ``PYTHONHASHSEED``, so the order of a set of texts is the same. Complete example::

        class Echo(Env):
            name = "echo"

            async def reset(self, row, seed):
                return "Say 'yes'."

            async def step(self, action):
                return EnvStep(reward=float(action == "yes"), done=True)
    """

    sampling: Sampling | None = None
    """Current sampling parameters of this episode. The rollout sets them before ``reset`` and before every ``step``.
    They are frozen. An environment changes them by ``EnvStep(sampling=replace(self.sampling, ...))``."""

    @classmethod
    def agents(cls, config: Any) -> Sequence[str]:
        """Names of the agents that the policy plays, according to the options. Empty: one unnamed agent.

        With names, each agent has a conversation, rewards and a baseline of its own (docs/how-to/environments.md).
        ``reset`` and each ``step`` that does not end the episode name the next agent (:attr:`EnvStep.agent`) and what
        it reads (:attr:`EnvStep.observation`)::

            class Bidding(Env):
                name = "bidding"

                @classmethod
                def agents(cls, config):
                    return ("first", "second")

                async def reset(self, row, seed):
                    self.bid = None
                    return EnvStep("Bid.", agent="first")

                async def step(self, action):
                    if self.bid is None:
                        self.bid = len(action)
                        return EnvStep("Bid more.", agent="second")
                    won = 1.0 if len(action) > self.bid else -1.0
                    return EnvStep(done=True, rewards={"first": -won, "second": won})
        """
        return ()

    @abstractmethod
    def reset(self, row: Row, seed: int) -> str | EnvStep | Awaitable[str | EnvStep]:
        """Start the episode. Returns the text that follows the row's prompt ("" for none). With several :meth:`agents`,
        returns an EnvStep with this text for the first agent."""

    @abstractmethod
    def step(self, action: str) -> EnvStep | Awaitable[EnvStep]:
        """Answer the policy's turn ``action`` (decoded text without special tokens), played by the agent whose turn it
        was."""

    def close(self) -> Awaitable[None] | None:
        """Release the resources of the episode. Called exactly once, also after an error."""
        return None
