"""Sampling parameters for environments. OpenRLHF passes vLLM's mutable ``SamplingParams``; here an environment gets its
own copy with the same fields."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from rlhf.types import Sampling

UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "n": (1, None),
    "min_tokens": (0, None),
    "presence_penalty": (0.0, None),
    "frequency_penalty": (0.0, None),
    "repetition_penalty": (1.0, None),
    "logit_bias": (None, {}),
    "allowed_token_ids": (None, []),
    "bad_words": (None, []),
}
"""{vLLM's parameter: values that mean it is off}."""


@dataclass
class SamplingParams:
    """The parameters with vLLM's names. A change affects the next turns of this sample only."""

    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    stop: list[str] = field(default_factory=list)
    stop_token_ids: list[int] = field(default_factory=list)
    ignore_eos: bool = False
    logprobs: int | None = 1
    seed: int | None = None


def to_params(sampling: Sampling) -> SamplingParams:
    s = sampling
    stops = (list(s.stop), list(s.stop_token_ids))
    return SamplingParams(s.max_new_tokens, s.temperature, s.top_p, s.top_k, s.min_p, *stops, s.ignore_eos)


def from_params(params: Any, sampling: Sampling) -> Sampling:
    """``sampling`` with the values of ``params``. Raises ValueError for values that are not supported here."""
    for name, defaults in UNSUPPORTED.items():
        if (value := getattr(params, name, None)) not in defaults:
            raise ValueError(f"sampling_params.{name} = {value!r} is not supported; leave it at {defaults[0]!r}")
    max_tokens = getattr(params, "max_tokens", None)
    top_k = getattr(params, "top_k", None)
    settings: dict[str, Any] = {
        "max_new_tokens": max_tokens,
        "temperature": getattr(params, "temperature", None),
        "top_p": getattr(params, "top_p", None),
        "top_k": max(0, top_k) if top_k is not None else None,  # in vLLM, -1 and 0 mean off
        "min_p": getattr(params, "min_p", None),
        "stop": _tuple(getattr(params, "stop", None)),
        "stop_token_ids": _tuple(getattr(params, "stop_token_ids", None)),
        "ignore_eos": getattr(params, "ignore_eos", None),
    }
    return replace(sampling, **{k: v for k, v in settings.items() if v is not None})


def _tuple(values: Any) -> tuple[Any, ...] | None:
    if values is None:
        return None
    return (values,) if isinstance(values, str) else tuple(values)
