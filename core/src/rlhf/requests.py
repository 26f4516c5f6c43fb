"""Checks of requests that every generator makes before it computes anything."""

from __future__ import annotations

import math

from rlhf.errors import ConfigError
from rlhf.types import GenerationRequest, Sampling


def check_sampling(sampling: Sampling, temperatures: tuple[float, float] = (0.0, math.inf)) -> None:
    """Raises :class:`~rlhf.errors.ConfigError`, with field, value and range, for values outside their range.

    Args:
        temperatures: lowest and highest temperature at which the generator samples exactly, besides 0 (greedy).
    """
    s, (low, high) = sampling, temperatures
    at_least = f"finite and at least {low}" if low else "a positive finite number"
    positive = at_least if high == math.inf else f"from {low} to {high}"
    temperature = s.temperature == 0 or (0 < s.temperature < math.inf and low <= s.temperature <= high)
    rules = (
        ("max_new_tokens", s.max_new_tokens, s.max_new_tokens >= 1, "at least 1"),
        ("temperature", s.temperature, temperature, f"0 (greedy) or {positive}"),
        ("top_p", s.top_p, 0 < s.top_p <= 1, "in (0, 1]; 1 turns it off"),
        ("top_k", s.top_k, s.top_k >= 0, "at least 0; 0 turns it off"),
        ("min_p", s.min_p, 0 <= s.min_p <= 1, "in [0, 1]; 0 turns it off"),
        ("stop", s.stop, all(s.stop), "strings of at least one character"),
    )
    for field, value, ok, allowed in rules:
        if not ok:
            raise ConfigError(
                f"sampling.{field} is {value!r}; it must be {allowed}. Change it in the sampling options."
            )


def check_request(i: int, request: GenerationRequest, vocabulary: int, has_base: bool = False) -> None:
    """Refuse a prompt or seed that no generator accepts.

    Args:
        vocabulary: size of the vocabulary in tokens.
        has_base: whether the generator can sample from the policy's base (:attr:`GenerationRequest.base`).
    """
    if not request.ids:
        raise ConfigError(f"request {i} has no tokens; a prompt needs at least one (a start token, for instance).")
    low, high = min(request.ids), max(request.ids)
    if low < 0 or high >= vocabulary:
        raise ConfigError(
            f"request {i} has token {low if low < 0 else high}; the model's ids are 0 to {vocabulary - 1}. Use the "
            "model's own tokenizer."
        )
    if request.base and not has_base:
        raise ConfigError(
            f"request {i} is for the policy's base, which this generator does not have. Train adapters "
            "(--trainer.lora.rank 16); an engine must keep them separate from its base (--sync.adapters alone)."
        )
    if not 0 <= request.seed < 2**64:
        raise ConfigError(f"request {i} has seed {request.seed}; a seed is an integer from 0 to 2**64 - 1.")
