"""What a generator is asked for, and what an environment answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn. Log-probs are of the distribution they are drawn from: after ``temperature`` and, where
    ``top_p``, ``top_k`` or ``min_p`` leave tokens out, renormalised over those that are left."""

    max_new_tokens: int = 256
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 = off."""
    min_p: float = 0.0
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    """Sample on to ``max_new_tokens``; benchmarks only."""


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One sample to draw. Equal ``ids`` in one call share their prefill."""

    ids: tuple[int, ...]
    seed: int
    sampling: Sampling


@dataclass(frozen=True, slots=True)
class EnvStep:
    """What an environment answers to one action."""

    observation: str = ""
    reward: float = 0.0
    done: bool = False
    sampling: Sampling | None = None
    """Replaces the sampling parameters from the next turn on. In training it may change ``max_new_tokens``,
    ``temperature`` (above 0) and what ends a turn; tokens that ``[sampling]`` allows stay allowed."""
    info: Mapping[str, Any] = field(default_factory=dict)
