"""What is expected of an H100 or H200 at full size. It is written down and printed before anything is measured.

The numbers of the section ``training`` come from a first measurement of single options on an H100: chunks of 2**28
logits, a head in bf16 and Liger's kernels, each compared with the defaults of that time (:data:`PLAIN`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

DEFAULTS, CHECKPOINTED, BF16 = "defaults, 16k", "checkpointing, 16k", "head in bf16, 16k"
PLAIN = "head in fp32, small chunks, transformers' layers, 16k"
"""Parts of the section ``training`` with one row of 16,384 tokens."""
RATE, MFU, PEAK, OF_PLAN = "tokens per second", "MFU %", "peak GiB", "reserved memory, of the plan"
SPEED, RATIO = "ours, tokens per second", "ours / trl"
"""Figures of the section ``throughput``."""
PRIME_RL = {RATE: 11.9e3, MFU: 11.1, PEAK: 12.5}
"""Published by prime-rl for Qwen3-0.6B with rows of 16,384 tokens on one H100. Its checkpointing and its optimizer
are other ones, so its memory compares with the part with checkpointing only."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """A figure, or a fact that holds (1) or not (0), in a closed range."""

    section: str
    part: str
    figure: str
    least: float
    most: float
    reason: str

    def measured(self, sections: dict[str, Any]) -> float | None:
        """None where the part was not run, or did not come so far."""
        part = sections.get(self.section, {}).get("parts", {}).get(self.part, {})
        value = part.get("figures", {}).get(self.figure)
        return float(value) if isinstance(value, (int, float)) else None

    def __str__(self) -> str:
        values = f"{self.least:,g}" if self.least == self.most else f"{self.least:,g} to {self.most:,g}"
        return f"{self.section}, {self.part}: {self.figure} {values}"


HEAD = "half of it is the head: fp32 without tensor cores, 149 chunks of 110 tokens"
EXPECTED: tuple[Prediction, ...] = (
    Prediction("determinism", "the same steps twice", "tensors that differ", 1, math.inf, "flash adds in any order"),
    Prediction("determinism", "the same steps twice, deterministic", "tensors that differ", 0, 0, "the order is fixed"),
    Prediction("training", DEFAULTS, RATE, 21e3, 26e3, "a bf16 head takes 0.84 s, Liger saves 0.18 s of 16 x 1k"),
    Prediction("training", DEFAULTS, MFU, 19, 25, "the same"),
    Prediction("training", PLAIN, RATE, 11e3, 12e3, HEAD),
    Prediction("training", CHECKPOINTED, PEAK, 11, 15, "8.9 of state, 2 of hidden states, a chunk"),
    Prediction("training", DEFAULTS, OF_PLAN, 0.75, 1.25, "the tolerance of the plan on a processor"),
    Prediction("training", CHECKPOINTED, OF_PLAN, 0.75, 1.25, "the same"),
    Prediction("throughput", "sft", SPEED, 20e3, 36e3, "8,704 tokens: 0.15 s of fixed work, the rest as in training"),
    Prediction(
        "throughput", "sft", RATIO, 0.8, 1.3, "the same kernels on both sides, TRL's head for trained tokens only"
    ),
    Prediction("throughput", "grpo-forced", RATIO, 0.7, 1.1, "equal engines, but TRL's sync proves nothing"),
    Prediction("throughput", "grpo-natural", RATIO, 0.8, 1.4, "TRL's rows are padded to the longest answer"),
    Prediction("throughput", "sft, TRL's rows padded", RATIO, 1.5, 2.6, "16 x 1,032 tokens for 8,704"),
    Prediction(
        "throughput", "grpo-forced, without vllm", RATIO, 0.9, 2.5, "own sampling loop beside transformers' generate"
    ),
    Prediction("colocated", "shared, compiled", "syncs at the first try, share", 1, 1, "graphs read weights in place"),
)


def of(sections: Iterable[str], device: str, small: bool) -> list[Prediction]:
    """Those of the sections; none for a run that is not the one they are about."""
    return [p for p in EXPECTED if p.section in sections and device == "cuda" and not small]


def announced(predictions: Iterable[Prediction]) -> Iterator[str]:
    lines = [f"  {prediction} ({prediction.reason})" for prediction in predictions]
    if not lines:
        yield "no predictions: they are about an H100 at full size, and about sections that are not chosen"
        return
    yield "expected of an H100, before anything is measured:"
    yield from lines
    yield "  for comparison, prime-rl's own row: " + ", ".join(f"{name} {x:,g}" for name, x in PRIME_RL.items())


def compared(predictions: Iterable[Prediction], sections: dict[str, Any]) -> list[dict[str, Any]]:
    """Each prediction with what was measured, and whether it came true; a wrong one does not make a run fail."""
    rows = []
    for prediction in predictions:
        value = prediction.measured(sections)
        true = None if value is None else prediction.least <= value <= prediction.most
        rows.append({"expected": str(prediction), "reason": prediction.reason, "measured": value, "true": true})
    return rows
