"""Requests to a generator, and the result of an environment's step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rlhf.types.arrays import IntArray, int_array
from rlhf.types.images import Image


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling parameters. Log-probs are of the distribution that tokens are drawn from: after ``temperature`` and, if
    ``top_p``, ``top_k`` or ``min_p`` exclude tokens, renormalised over the remaining tokens."""

    max_new_tokens: int = 256
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 = off."""
    min_p: float = 0.0
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    """Do not stop at the end token but at ``max_new_tokens``; for benchmarks only."""


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One sample to draw. Requests with the same context (:attr:`context_key`) in one call share their prefill.

    The constructor takes any sequence of ints for ``ids``; it raises as :class:`~rlhf.types.Turn` does.
    """

    ids: IntArray
    """``array("i")``, one int a token. Requests may share one array."""
    seed: int
    sampling: Sampling
    images: tuple[Image, ...] = ()
    """The images that tokens of ``ids`` stand for, in order (capability ``images``)."""
    base: bool = False
    """Sample from the policy's view ``base`` (:attr:`~rlhf.interfaces.TrainerFacts.views`), the model that training
    started from, in place of the current weights (capability ``base``)."""

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
        """Equal for requests of the same weights with equal tokens and images."""
        weights = b"base" if self.base else b""
        return b"".join([self.ids.tobytes(), *(image.data for image in self.images), weights])


@dataclass(frozen=True, slots=True)
class EnvStep:
    """An environment's answer to one action; with several agents also what it begins with."""

    observation: str = ""
    """For the agent whose turn is next. It says what only this agent may know, and what the others did."""
    reward: float = 0.0
    """Of the action, for the agent that acted."""
    done: bool = False
    sampling: Sampling | None = None
    """Replaces the sampling parameters from the next turn on. In training it may change ``max_new_tokens``,
    ``temperature`` (above 0) and the stop conditions. It may not exclude tokens that ``[sampling]`` allows."""
    info: Mapping[str, Any] = field(default_factory=dict)
    """JSON values. Numbers and bools are stored with the sample, of each key the last value of the episode. Their means
    over the samples that have the key are metrics, ``env/KEY``: give a share its 0 too."""
    images: tuple[bytes, ...] = ()
    """Contents of image files, shown to the policy before the text of the observation."""
    score: float | None = None
    """Read by the dynamic filter in place of the sum of the episode's rewards; the last one counts. None: the filter
    reads the rewards."""
    agent: str = ""
    """Whose turn is next, where the policy plays several agents (:meth:`~rlhf.interfaces.Env.agents`). Not read at the
    end."""
    rewards: Mapping[str, float] = field(default_factory=dict)
    """{agent: reward}, where the policy plays several agents. Each is added to the last turn of its agent, as where
    a move of one ends a game for all; to its first turn, if it had none yet."""
