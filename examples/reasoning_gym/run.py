"""Warm-start a small model on flawed demonstrations, then train it with the scores of reasoning-gym.

`python examples/reasoning_gym/run.py`, from the root of the repository. Every step is a command that is printed first.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

HERE = Path("examples/reasoning_gym")
RUNS = Path("runs/reasoning_gym")


def run(*command: str) -> None:
    """Print a command and run it with this Python; end the program if it fails."""
    print(f"\n$ {' '.join(command)}", flush=True)
    words = [sys.executable, *(("-m", "rlhf_cli.main") if command[0] == "rlhf" else ()), *command[1:]]
    if subprocess.run(words).returncode:
        sys.exit(f"`{' '.join(command)}` failed; the message above says why")


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, help="steps of both trainings; fewer show less (default: the run files')")
    steps = parser.parse_args(words).steps
    shorter = () if steps is None else ("--steps", str(steps))
    start = time.perf_counter()
    shutil.rmtree(RUNS, ignore_errors=True)
    run("python", str(HERE / "make_task.py"), str(RUNS / "task"))
    run("rlhf", "train", str(HERE / "sft.toml"), *shorter)
    run("rlhf", "train", str(HERE / "rloo.toml"), *shorter)
    lines = [json.loads(line) for line in (RUNS / "rloo" / "metrics.jsonl").read_text().splitlines()]
    first, *_, last = [line for line in lines if "eval/pass@1" in line]
    print(
        f"\nin {time.perf_counter() - start:.0f} s. held-out words spelled backward: "
        f"{first['eval/pass@1']:.3f} -> {last['eval/pass@1']:.3f}"
    )


if __name__ == "__main__":
    main()
