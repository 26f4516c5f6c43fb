"""Rollouts: how a prompt becomes a trajectory, token in, token out."""

from __future__ import annotations

from abc import ABC, abstractmethod

from rlhf.interfaces.component import Component
from rlhf.interfaces.env import Env
from rlhf.types import Row, Sampling, Turn


class RolloutContext(ABC):
    """What a rollout may use. One per sample."""

    index: tuple[int, int] = (0, 0)
    """(group number in the run, sample in the group)."""
    sampling: Sampling
    max_tokens: int
    """Longest sequence the policy is allowed: prompt, observations and samples together."""

    @abstractmethod
    def encode_prompt(self, row: Row) -> Turn:
        """The row's prompt through its template, as an unsampled turn."""

    @abstractmethod
    def encode_observation(self, text: str) -> Turn:
        """Text from the environment as an unsampled turn, wrapped as the chat template wraps a user turn
        (plain where prompts are plain), ready for the policy to answer."""

    def encode_opening(self, row: Row, text: str) -> list[Turn]:
        """The row's prompt and what the environment says at its start (nothing where ``text`` is empty), ready for the
        policy to answer. A context whose prompts go through a chat template overrides this, so that the prompt does
        not end with the head of an answer that never comes."""
        return [self.encode_prompt(row), *([self.encode_observation(text)] if text else [])]

    @abstractmethod
    async def generate(self, turns: list[Turn], sampling: Sampling, turn_number: int = 0) -> Turn:
        """One sampled turn after ``turns``. The seed is derived from the sample's index and ``turn_number``."""

    @abstractmethod
    async def open_env(self) -> Env:
        """A fresh environment whose calls have deadlines; closed by the core when the sample ends."""


class Rollout(Component):
    """How a prompt becomes a trajectory.

    Complete example (what ``single_turn`` does)::

        class SingleTurn(Rollout):
            name = "single_turn"

            async def run(self, row, seed, ctx):
                prompt = ctx.encode_prompt(row)
                return [prompt, await ctx.generate([prompt], ctx.sampling)]
    """

    needs_env: bool = False
    replays_env: bool = False
    """True: its turns bring the rewards of a recorded environment along, so ``[env]`` may stay in the run file though
    none is opened; ``env.credit`` says where they go."""
    needs_generator: bool = True
    """False: it never calls ``ctx.generate``, so the run starts no generator and syncs no weights."""

    def check(self) -> None:
        """Refuse before anything starts what every :meth:`run` would fail for: a file that is not there, say. Raises
        ConfigError."""

    @abstractmethod
    async def run(self, row: Row, seed: int, ctx: RolloutContext) -> list[Turn]:
        """All turns of one sample.

        Args:
            seed: for the environment; equal for all samples of a prompt, so that a group baseline compares answers to
                the same task. What the policy samples has seeds of its own (:meth:`RolloutContext.generate`).
        """
