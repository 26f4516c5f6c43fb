"""Settings of all arms: the workloads, the optimizer, and how a process is measured. Standard library only: both Python
environments import it."""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import time
from pathlib import Path
from typing import Any

THREADS = int(os.environ.get("BENCH_THREADS", "2"))
"""torch threads of every arm; the published figures use two."""
DEVICE = os.environ.get("BENCH_DEVICE", "cpu")
"""``cpu``, or ``cuda`` for the first GPU (benchmarks/gpu)."""
PROMPTS, SAMPLES, MAX_NEW_TOKENS = 16, 8, 64
PROMPT_TOKENS = 64
"""Room for a prompt; they are shorter."""
ROWS, SHORTEST, LONGEST = 16, 20, 200
SIZES: dict[str, int] = {"hidden": 256, "intermediate": 704, "layers": 6, "heads": 8, "kv_heads": 4, "head_dim": 32}
VOCABULARY = 0
"""Tokens of the model's tokenizer; 0: its characters and nothing more."""
OURS: dict[str, dict[str, Any]] = {}
"""Overrides of our run file, section by section."""
LEARNING_RATE, BETAS, EPS, WEIGHT_DECAY, MAX_GRAD_NORM = 1e-6, (0.9, 0.999), 1e-8, 0.0, 1.0
"""Learning rate so small that the weights, and so the lengths of answers, do not change while steps are timed."""
REWARD = "digits"
"""Of GRPO's answers: the share of ``digits``, or 1 where the last number is the ``sum`` of the prompt's last two."""
WORKLOADS = ("grpo-forced", "grpo-natural", "sft")
"""Of `make bench`."""
PREFERENCES = ("dpo", "dpo-cached", "dpo-prompts", "reward")
"""Of preferences.py: 16 pairs of SHORTEST to LONGEST tokens with the reference along; with the reference's log-probs
computed before the first step; with long prompts, which the two answers of a pair share; a reward model."""
LONG_PROMPT, ANSWERS = 200, (20, 64)
"""Tokens of a prompt, and least and most of an answer, of ``dpo-prompts``."""
_CHANGES: dict[str, Any] = json.loads(os.environ.get("BENCH_SETTINGS", "{}"))
if unknown := sorted(_CHANGES.keys() - globals().keys()):
    raise SystemExit(f"BENCH_SETTINGS names {', '.join(unknown)}, which benchmarks/settings.py does not have")
globals().update(_CHANGES)  # changes that hold for every arm


def reward(prompt: str, answer: str) -> float:
    """Cheap, and the same function in every arm."""
    if REWARD == "digits":
        return sum(c.isdigit() for c in answer) / max(1, len(answer))
    summands, result = (re.findall(r"\d+", text) for text in (prompt, answer))
    return float(result[-1:] == [str(sum(map(int, summands[-2:])))])


def memory_mib(field: str) -> float:
    """``VmRSS`` (resident now) or ``VmHWM`` (peak resident) of this process, in MiB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) / 1024
    raise LookupError(f"/proc/self/status has no {field}: these benchmarks need Linux")


def settle() -> None:
    """Wait for a GPU to finish its work, so that a time includes it."""
    if DEVICE == "cuda":
        import torch

        torch.cuda.synchronize()


class Ended(BaseException):
    """A clock lets no more steps be made. No ``Exception``, which trainers would take for an error of the step."""


class Clock:
    """Times whole steps, from the end of one to the end of the next, so time between steps is included."""

    def __init__(self, warmup: int) -> None:
        self.untimed, self.before_mib = warmup, memory_mib("VmRSS")
        self.timed: list[bool] = []
        """Of each step."""
        self.seconds: list[float] = []
        """Of each timed step, as the following lists."""
        self.processor_seconds: list[float] = []
        self.tokens: list[int] = []
        """Tokens that the step learned from or sampled, as the arm counts them."""

    def begin(self) -> None:
        """Right before a step."""
        self.start = time.perf_counter(), time.process_time()

    def step(self, tokens: int) -> None:
        """At the end of a step, which is the begin of the next one."""
        settle()
        ends = time.perf_counter(), time.process_time()
        self.timed.append(self.untimed == 0)
        if self.timed[-1]:
            self.seconds.append(ends[0] - self.start[0])
            self.processor_seconds.append(ends[1] - self.start[1])
            self.tokens.append(tokens)
        self.untimed = max(0, self.untimed - 1)
        self.begin()

    def result(self) -> dict[str, Any]:
        return self._device() | {
            "seconds": self.seconds,
            "processor_seconds": self.processor_seconds,
            "tokens": self.tokens,
            "peak_mib": memory_mib("VmHWM"),
            "before_mib": self.before_mib,
        }

    def _device(self) -> dict[str, float]:
        """Peak GPU memory of tensors, and peak memory that torch reserved for them."""
        if DEVICE != "cuda":
            return {}
        import torch

        peak, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        return {"peak_device_mib": peak / 2**20, "reserved_device_mib": reserved / 2**20}


def arm_arguments(description: str) -> argparse.Namespace:
    """The command line of the scripts that time one workload in one precision."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("workload", choices=(*WORKLOADS, *PREFERENCES))
    parser.add_argument("precision", choices=("fp32", "bf16"))
    parser.add_argument("--work", type=Path, required=True, help="folder made by model.py")
    parser.add_argument("--result", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--steps", type=int, default=5, help="timed steps")
    parser.add_argument("--warmup", type=int, default=2, help="steps before them, not timed")
    parser.add_argument("--parts", type=int, default=1, help="TRL, grpo: batches that a step's samples are cut into")
    parser.add_argument("--scale", type=int, default=1, help="times the tokens of a step")
    return parser.parse_args()


def write(path: Path, result: dict[str, Any]) -> None:
    path.write_text(json.dumps(result, indent=1) + "\n")


def median(values: list[float]) -> float:
    return float(statistics.median(values))
