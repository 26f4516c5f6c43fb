"""The tables of the pipeline: held-out figures of each stage, each model's answers, and the reward model's verdict."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlhf_runtime.output.metrics import read_metrics

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from examples.rlhf.run import RESULTS, RUNS, answers

LEARNED = {"sft": ("loss",), "reward_model": ("accuracy", "loss"), "dpo": ("accuracy", "loss")}
"""Metrics on held-out rows, by stage."""
Answers = Sequence[Mapping[str, Any]]


def read(path: Path) -> Answers:
    """The answers that `rlhf eval --save` wrote, one to each held-out prompt, in their order."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n")[:-1]]


def value(answer: Mapping[str, Any], reward: str) -> float:
    return float(answer["rewards"][reward]["value"])


def spread(numbers: Sequence[float]) -> str:
    """Mean and standard error."""
    mean = round(statistics.mean(numbers), 2) + 0.0  # no -0.00
    return f"{mean:.2f} ± {statistics.stdev(numbers) / len(numbers) ** 0.5:.2f}"


def row(samples: Answers) -> list[str]:
    lengths = [sum(len(turn["ids"]) for turn in a["turns"] if turn["sampled"]) for a in samples]
    cut = sum(a["status"] == "truncated" for a in samples) / len(samples)
    rewards = (spread([value(a, name) for a in samples]) for name in ("score", "kl"))
    return [*rewards, f"{statistics.mean(lengths):.1f}", f"{cut:.2f}"]


def preferred(first: Answers, second: Answers) -> float:
    """Share of the prompts whose answer in ``first`` has the higher score; equal scores count half."""
    pairs = [(value(a, "score"), value(b, "score")) for a, b in zip(first, second, strict=True)]
    return sum((a > b) + (a == b) / 2 for a, b in pairs) / len(pairs)


def column(lines: Sequence[Mapping[str, Any]], metric: str) -> list[float]:
    return [line[f"eval/{metric}"] for line in lines]


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> None:
    for stage, names in LEARNED.items():
        if not (RUNS / stage / "model").exists():
            continue
        lines = [line for line in read_metrics(RUNS / stage / "metrics.jsonl") if "eval/loss" in line]
        changes = (f"{name} {' -> '.join(f'{value:.3f}' for value in column(lines, name))}" for name in names)
        print(f"{stage}, held-out pairs: {', '.join(changes)}")
    every = {name: read(answers(name)) for name in RESULTS if answers(name).exists()}
    print(f"\nAnswers to {len(every['sft'])} held-out prompts at temperature 1:\n")
    head = ["model", "reward", "KL to sft, nats", "tokens", "cut"]
    print(table(head, [[name, *row(samples)] for name, samples in every.items()]))
    print("\nShare of the prompts for which the reward model prefers the answer of the row to that of the column:\n")
    shares = [
        [name, *("" if name == other else f"{preferred(every[name], every[other]):.2f}" for other in every)]
        for name in every
    ]
    print(table(["", *every], shares))


if __name__ == "__main__":
    main()
