"""Rollouts: how a prompt becomes a trajectory, token in, token out."""

from __future__ import annotations

from abc import ABC, abstractmethod

from rlhf.interfaces.component import Component
from rlhf.interfaces.env import Env
from rlhf.types import Row, Sampling, Turn


class RolloutContext(ABC):
    """The services that a rollout may use. Every sample has its own context."""

    index: tuple[int, int] = (0, 0)
    """(group number in the run, sample in the group)."""
    sampling: Sampling
    max_tokens: int
    """Largest number of tokens in a sequence: prompt, observations and sampled tokens together."""

    @abstractmethod
    def encode_prompt(self, row: Row) -> Turn:
        """The row's prompt, encoded with the template, as an unsampled turn."""

    @abstractmethod
    def encode_observation(self, text: str) -> Turn:
        """Text from the environment as an unsampled turn that the policy can answer. It is wrapped as the chat template
        wraps a user turn; it is plain if prompts are plain."""

    def encode_opening(self, row: Row, text: str) -> list[Turn]:
        """The row's prompt and the environment's first observation ``text`` (none if empty), as turns that the policy
        can answer. A context with a chat template overrides this method: the prompt must not end with the header of an
        assistant turn when an observation follows."""
        return [self.encode_prompt(row), *([self.encode_observation(text)] if text else [])]

    @abstractmethod
    async def generate(self, turns: list[Turn], sampling: Sampling, turn_number: int = 0) -> Turn:
        """Sample one turn after ``turns``. The seed is derived from the sample's index and ``turn_number``."""

    @abstractmethod
    async def open_env(self) -> Env:
        """A new environment whose calls have deadlines. The runtime closes it when the sample ends."""


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
    """True: the rollout replays turns that contain the rewards of a recorded environment. ``[env]`` may then stay in
    the run file although no environment is opened; ``env.credit`` says how the rewards are credited."""
    needs_generator: bool = True
    """False: the rollout never calls ``ctx.generate``, so the run starts no generator and sends no weights."""

    def check(self) -> None:
        """Check before the run starts for causes that would fail every :meth:`run`, such as a missing file. Raises
        ConfigError."""

    @abstractmethod
    async def run(self, row: Row, seed: int, ctx: RolloutContext) -> list[Turn]:
        """All turns of one sample.

        Args:
            seed: for the environment. It is equal for all samples of a prompt, so that a group baseline compares
                answers to the same task. Sampling uses other seeds (:meth:`RolloutContext.generate`).
        """
