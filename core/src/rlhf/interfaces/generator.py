"""Generators: sample tokens with log-probs and take new weights."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from rlhf.interfaces.component import Component, ComponentConfig
from rlhf.types import GenerationRequest, Turn


@dataclass(frozen=True, slots=True)
class Proof:
    """What a generator shows after taking weights."""

    version: int
    tensors: int = 0
    detail: str = ""


class Generator(Component):
    """Samples are a function of (weights, ids, seed, sampling); neighbours in the batch do not enter beyond
    floating-point rounding."""

    capabilities: ClassVar[frozenset[str]] = frozenset()
    """``accept:module`` (samples from a trainer's module in this process), ``accept:tensors``, ``logprobs``,
    ``seeds``, ``sleep``, ``top_p``, ..."""

    version: int = 0
    """Weight version of what is sampled now: the number of updates the policy had."""

    @abstractmethod
    def __init__(self, config: ComponentConfig | None, *, eos_token_ids: Sequence[int], decode: Any) -> None:
        """``decode(ids) -> str`` decodes for stop strings and ``Turn.text``."""

    @abstractmethod
    def generate(self, requests: Sequence[GenerationRequest]) -> Iterator[tuple[int, Turn]]:
        """(position in ``requests``, sampled turn), as samples finish. An end token is part of the turn."""

    @abstractmethod
    def load(self, source: Any, version: int) -> Proof:
        """Take weights: a trainer (``accept:module``) or an iterator of (name, tensor)."""

    def sleep(self) -> None:
        """Give device memory back until :meth:`wake`."""

    def wake(self) -> None:
        """Be ready to generate."""
