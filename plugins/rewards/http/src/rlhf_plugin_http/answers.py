"""The server's answer, checked."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from rlhf.errors import RewardError, shown
from rlhf.types import RewardResult


def results(body: bytes, samples: int, url: str) -> list[RewardResult]:
    """One result per sample.

    Args:
        body: ``{"rewards": [...], "scores": [...], "extra_logs": {name: [...]}}``; only ``rewards`` is required.

    Raises RewardError for anything else.
    """
    try:
        answer = json.loads(body, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        start = body[:80].decode(errors="replace")
        raise RewardError(f"{url} answered {start!r}, which is not JSON: {error}. The reward expects JSON.") from None
    if not isinstance(answer, Mapping) or "rewards" not in answer:
        raise RewardError(f"{url} answered {shown(answer)}. The reward expects an object with the key 'rewards'.")
    values = _numbers(answer["rewards"], "rewards", samples, url)
    scores = answer.get("scores")
    filtered: list[float] | list[None] = [None] * samples
    if scores is not None:
        filtered = _numbers(scores, "scores", samples, url)
    logs = answer.get("extra_logs") or {}
    if not isinstance(logs, Mapping):
        raise RewardError(f"{url} answered extra_logs = {shown(logs)}. The reward expects an object of lists.")
    columns = {str(name): _numbers(column, f"extra_logs.{name}", samples, url) for name, column in logs.items()}
    return [
        RewardResult(value, score, info={name: column[n] for name, column in columns.items()})
        for n, (value, score) in enumerate(zip(values, filtered, strict=True))
    ]


def _numbers(values: Any, name: str, samples: int, url: str) -> list[float]:
    if not isinstance(values, list) or len(values) != samples:
        summary = f"{len(values)} values" if isinstance(values, list) else shown(values)
        raise RewardError(
            f"{url} answered {summary} as {name!r} of {samples} samples. The reward expects one per sample."
        )
    for n, value in enumerate(values):
        if type(value) not in (int, float) or not math.isfinite(value):
            raise RewardError(f"{url} answered {shown(value)} as {name}[{n}]. The reward expects a finite number.")
    return [float(value) for value in values]


def _refuse(constant: str) -> float:
    raise ValueError(f"{constant} is a number that is not finite")
