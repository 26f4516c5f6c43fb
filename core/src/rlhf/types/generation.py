"""Requests to a generator, and the result of an environment's step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rlhf.types.arrays import IntArray, int_array
from rlhf.types.images import Image


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling parameters. Log-probs refer to the distribution that tokens are sampled from: after ``temperature`` and,
    if ``top_p``, ``top_k`` or ``min_p`` exclude tokens, renormalised over the remaining tokens."""

    max_new_tokens: int = 256
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 = off."""
    min_p: float = 0.0
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    """Ignore the end token and stop at ``max_new_tokens``; for benchmarks only."""


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A request for one sample. Requests in one call that have the same context (:attr:`context_key`) share their
    prefill.

    The constructor accepts any sequence of ints for ``ids``, and raises the same errors as :class:`~rlhf.types.Turn`.
    """

    ids: IntArray
    """``array("i")``, one int per token. Requests may share one array."""
    seed: int
    sampling: Sampling
    images: tuple[Image, ...] = ()
    """The images that tokens of ``ids`` stand for, in order (capability ``images``)."""
    base: bool = False
    """Sample from the policy's view ``base`` (:attr:`~rlhf.interfaces.TrainerFacts.views`), the model that training
    started from, instead of the current weights (capability ``base``)."""

    if TYPE_CHECKING:  # the constructor takes more types than the field has

        def __init__(
            self,
            ids: Sequence[int],
            seed: int,
            sampling: Sampling,
            images: tuple[Image, ...] = (),
            base: bool = False,
        ) -> None: ...

    def __post_init__(self) -> None:
        object.__setattr__(self, "ids", int_array(self.ids, "GenerationRequest.ids"))

    @property
    def context_key(self) -> bytes:
        """Equal for requests with equal tokens and images that sample from the same weights."""
        weights = b"base" if self.base else b""
        return b"".join([self.ids.tobytes(), *(image.data for image in self.images), weights])


@dataclass(frozen=True, slots=True)
class EnvStep:
    """An environment's answer to one action. With several agents also its first observation."""

    observation: str = ""
    """Observation of the agent whose turn is next, including what only this agent may know and what the others did."""
    reward: float = 0.0
    """Reward of the action, for the agent that acted."""
    done: bool = False
    sampling: Sampling | None = None
    """Sampling parameters from the next turn on. In training they may change ``max_new_tokens``, ``temperature`` (above
    0) and the stop conditions. They must not exclude tokens that ``[sampling]`` allows."""
    info: Mapping[str, Any] = field(default_factory=dict)
    """JSON values. For each key, the last number or bool of the episode is stored with the sample. The metric
    ``env/KEY`` is the mean over the samples that have the key, so a share needs its 0 too."""
    images: tuple[bytes, ...] = ()
    """Contents of image files, shown to the policy before the text of the observation."""
    score: float | None = None
    """Score for the dynamic filter, used instead of the sum of the episode's rewards. The last score counts. None: the
    filter uses the rewards."""
    agent: str = ""
    """The agent whose turn is next, if the policy plays several agents (:meth:`~rlhf.interfaces.Env.agents`). Ignored
    at the end."""
    rewards: Mapping[str, float] = field(default_factory=dict)
    """{agent: reward}, if the policy plays several agents. Each reward is added to the last turn of its agent, for
    example when one agent's move ends the game for all. If the agent has not played yet, it is added to its first
    turn."""
