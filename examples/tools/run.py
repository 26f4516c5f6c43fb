"""Learn to ask a calculator: `python examples/tools/run.py`, from the root of the repository.

Every step is an `rlhf` command that is printed before it runs, so each can be repeated and changed by hand.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from pathlib import Path

from make_task import make
from rlhf_cli.main import main as rlhf
from rlhf_runtime.checkpoint.saved_groups import recorded

HERE, RUNS = Path("examples/tools"), Path("runs/tools")


def run(*words: str) -> None:
    print(f"\n$ rlhf {' '.join(words)}", flush=True)
    if code := rlhf(words):
        stopped = code == 130  # by a Ctrl-C
        sys.exit("stopped" if stopped else f"`rlhf {' '.join(words)}` failed; the message above says why")


def calls(step: int) -> float:
    """Share of a step's samples that call the tool."""
    samples = [sample for _, sample in recorded(RUNS / "rloo" / "rollouts" / f"step-{step:06}.arrow")]
    return sum(len(sample["turns"]) > 2 for sample in samples) / len(samples)


def main() -> None:
    start = time.perf_counter()
    shutil.rmtree(RUNS, ignore_errors=True)
    make(RUNS / "task")
    run("train", str(HERE / "warm_start.toml"))
    run("train", str(HERE / "rloo.toml"))
    lines = [json.loads(line) for line in (RUNS / "rloo" / "metrics.jsonl").read_text().splitlines()]
    held_out = [(line["step"], line["eval/pass@1"]) for line in lines if "eval/pass@1" in line]
    print(f"\n{time.perf_counter() - start:.0f} s")
    print("held-out accuracy: " + ", ".join(f"step {step}: {accuracy:.2f}" for step, accuracy in held_out))
    print(f"samples that call the tool: {calls(1):.2f} -> {calls(lines[-1]['step']):.2f}")


if __name__ == "__main__":
    main()
