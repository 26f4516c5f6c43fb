"""Warm-start a small model on flawed demonstrations, then train it with the scores of reasoning-gym.

`python examples/reasoning_gym/run.py`, from the root of the repository. Every step is a command that is printed first.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

HERE = Path("examples/reasoning_gym")
RUNS = Path("runs/reasoning_gym")


def run(*command: str) -> None:
    """Print a command and run it with this Python; end the program if it fails."""
    print(f"\n$ {' '.join(command)}", flush=True)
    words = [sys.executable, *(("-m", "rlhf_cli.main") if command[0] == "rlhf" else ()), *command[1:]]
    if subprocess.run(words).returncode:
        sys.exit(f"`{' '.join(command)}` failed; the message above says why")


def main() -> None:
    start = time.perf_counter()
    shutil.rmtree(RUNS, ignore_errors=True)
    run("python", str(HERE / "make_task.py"), str(RUNS / "task"))
    run("rlhf", "train", str(HERE / "sft.toml"))
    run("rlhf", "train", str(HERE / "rloo.toml"))
    lines = [json.loads(line) for line in (RUNS / "rloo" / "metrics.jsonl").read_text().splitlines()]
    first, *_, last = [line for line in lines if "eval/pass@1" in line]
    print(
        f"\nin {time.perf_counter() - start:.0f} s. held-out words spelled backward: "
        f"{first['eval/pass@1']:.3f} -> {last['eval/pass@1']:.3f}"
    )


if __name__ == "__main__":
    main()
