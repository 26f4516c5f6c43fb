"""Does a continuous stream overlap? The time of a step compared with the longer of generation and learning.

    python benchmarks/overlap.py [--steps 14] [--output results/NAME.json]

On the simulated runtime: engines and training take the time that they are told, and the controller is the real one.
Generation alone is a continuous stream of staleness 2 whose learning takes no time. Then for each time of learning
waves and the same stream are measured. In waves a step takes the sum of both, and waits for the longest answer. All
times are simulated seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rlhf_cli.main import main as rlhf
from rlhf_runtime.output.metrics import read_metrics
from rlhf_testing.tiny import tiny_model
from stream import machine

SPEED = 5.0
"""Simulated seconds per second."""
BATCH, SAMPLES, ENGINES = 16, 4, 4
TOKENS = 200.0
"""Mean of an answer, drawn at 50 tokens a second. The engines work on one batch at a time."""
LEARNING = (1.0, 2.0, 4.0, 8.0, 16.0)
WARM_UP = 4


def seconds_of_a_step(folder: Path, learning: float, steps: int, *stream: str) -> float:
    """Mean over the steps after the warm-up."""
    values = {
        "algo": "grpo",
        "model": folder / "model",
        "data": folder / "data.jsonl",
        "backend": "simulated",
        "trainer.speed": SPEED,
        "trainer.seconds": learning,
        "generator.speed": SPEED,
        "generator.tokens": TOKENS,
        "generator.tokens_sigma": 0.3,
        "generator.engines": ENGINES,
        "generator.slots": BATCH * SAMPLES // ENGINES,
        "sampling.samples_per_prompt": SAMPLES,
        "sampling.max_new_tokens": 1000,
        "data.batch_size": BATCH,
        "data.max_tokens": 2000,
        "run.steps": steps,
        "run.output": folder / "run",
        "checkpoint.save_rollouts": "false",
        "reward": "length",
        "reward.length.high": 100000,
    }
    flags = [str(word) for name, value in values.items() for word in (f"--{name}", value)]
    if code := rlhf(["train", *flags, "--run.overwrite", *stream]):
        raise SystemExit(code)
    lines = read_metrics(folder / "run" / "metrics.jsonl")[WARM_UP:]
    return statistics.fmean(line["time/step"] for line in lines) * SPEED


def measure(folder: Path, times: Sequence[float], steps: int) -> list[dict[str, float]]:
    """One line for each time of learning."""
    continuous = ("--stream.mode", "continuous", "--stream.staleness", "2")
    generation = seconds_of_a_step(folder, 0.0, steps, *continuous)
    figures = []
    for learning in times:
        waves = seconds_of_a_step(folder, learning, steps)
        step = seconds_of_a_step(folder, learning, steps, *continuous)
        longer = max(generation, learning)
        figures.append(
            {
                "learning": learning,
                "generation": generation,
                "waves": waves,
                "continuous": step,
                "of the longer": step / longer,
                "of the sum": step / (generation + learning),
            }
        )
    return figures


def table(rows: Sequence[dict[str, float]]) -> str:
    lines = ["| " + " | ".join(rows[0]) + " |", "|" + "---|" * len(rows[0])]
    for line in rows:
        *seconds, longer, total = line.values()
        lines.append("| " + " | ".join(f"{value:.1f} s" for value in seconds) + f" | {longer:.2f} | {total:.2f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=14, help=f"of each run; the first {WARM_UP} are not counted")
    parser.add_argument("--learning", type=float, nargs="+", default=LEARNING, help="seconds that a step learns")
    parser.add_argument("--output", type=Path, help="also write the figures here, as JSON")
    options = parser.parse_args()
    if options.steps <= WARM_UP:
        parser.error(f"--steps {options.steps}: the first {WARM_UP} steps are not counted; give more")
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tiny_model(folder / "model", hidden=16, heads=2, kv_heads=1)
        rows = [{"prompt": f"{n}=", "answer": str(n)} for n in range(2000)]
        (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        figures = measure(folder, options.learning, options.steps)
    print(f"\n{table(figures)}")
    if options.output is not None:
        text = {"overlap": figures, "machine": machine() | {"load_before": load}}
        options.output.write_text(json.dumps(text, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
