"""Samples a second of a continuous stream compared with waves, on the simulated runtime: engines, training and
environments take the time that they are told, and the controller is the real one.

    python benchmarks/stream.py [--output results/NAME.json]

The environment answers after a log-normal delay of 0.5 s on average, one in a hundred after 5 s. An episode has 4
turns. All times are simulated seconds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

from rlhf_cli.main import main as rlhf
from rlhf_runtime.observe import read_metrics
from rlhf_testing.tiny import tiny_model

SPEED = 10.0
"""Simulated seconds per second."""
STEPS, WARM_UP = 14, 4
BATCH, SAMPLES = 16, 4
WORKLOADS: dict[str, dict[str, Any]] = {
    "delays, learning 2 s": {"trainer": 2.0, "tokens": 40.0},
    "delays, learning 8 s": {"trainer": 8.0, "tokens": 40.0},
    "no delays, long answers, learning 8 s": {"trainer": 8.0, "tokens": 400.0, "env": False},
}
STREAMS: dict[str, list[str]] = {
    "waves": ["--stream.mode", "waves"],
    "continuous, submission, staleness 1": ["--stream.mode", "continuous", "--stream.staleness", "1"],
    "continuous, submission, staleness 4": ["--stream.mode", "continuous", "--stream.staleness", "4"],
    "continuous, completion, staleness 4": [
        *["--stream.mode", "continuous", "--stream.staleness", "4", "--stream.order", "completion"],
    ],
}


def arguments(folder: Path, workload: dict[str, Any], stream: list[str]) -> list[str]:
    speed = str(SPEED)
    common = {
        "algo": "grpo",
        "model": folder / "model",
        "data": folder / "data.jsonl",
        "backend": "simulated",
        "trainer.speed": speed,
        "trainer.seconds": workload["trainer"],
        "generator.speed": speed,
        "generator.tokens": workload["tokens"],
        "generator.engines": 4,
        "generator.slots": 256,
        "sampling.samples_per_prompt": SAMPLES,
        "sampling.max_new_tokens": 2000,
        "data.batch_size": BATCH,
        "data.max_tokens": 20000,
        "run.steps": STEPS,
        "run.output": folder / "run",
        "checkpoint.save_rollouts": "false",
    }
    if workload.get("env", True):
        common |= {"rollout.use": "multi_turn", "env.use": "simulated", "env.slow_share": 0.01, "env.speed": speed}
    else:
        common |= {"reward": "length", "reward.length.high": 100000}
    flags = [str(word) for name, value in common.items() for word in (f"--{name}", value)]
    return ["train", *flags, "--run.overwrite", *stream]


def measure(folder: Path, workload: dict[str, Any], stream: list[str]) -> dict[str, float]:
    """Medians over the steps after the warm-up."""
    code = rlhf(arguments(folder, workload, stream))
    if code:
        raise SystemExit(code)
    lines = read_metrics(folder / "run" / "metrics.jsonl")[WARM_UP:]
    step = statistics.fmean(line["time/step"] for line in lines) * SPEED
    return {
        "step [s]": step,
        "waiting for samples [s]": statistics.fmean(line["time/generate"] for line in lines) * SPEED,
        "samples a second": BATCH * SAMPLES / step,
        "age, median": statistics.fmean(line.get("stream/age", 0.0) for line in lines),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, help="also write the figures here, as JSON")
    options = parser.parse_args()
    found: dict[str, dict[str, dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tiny_model(folder / "model", hidden=16, heads=2, kv_heads=1)
        rows = [{"prompt": f"{n}=", "answer": str(n)} for n in range(2000)]
        (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        for title, workload in WORKLOADS.items():
            found[title] = {stream: measure(folder, workload, flags) for stream, flags in STREAMS.items()}
    for title, streams in found.items():
        waves = streams["waves"]["samples a second"]
        print(f"\n{title}\n\n| stream | step | waiting | samples a second | ratio | age |\n|---|---|---|---|---|---|")
        for stream, figures in streams.items():
            step, waiting, rate, age = figures.values()
            print(f"| {stream} | {step:.1f} s | {waiting:.1f} s | {rate:.1f} | {rate / waves:.2f} | {age:.1f} |")
    if options.output is not None:
        options.output.write_text(json.dumps(found, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
