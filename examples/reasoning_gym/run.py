"""Warm-start a small model on flawed demonstrations, then train it with the scores of reasoning-gym.

`python examples/reasoning_gym/run.py`, from the root of the repository. Every step is a command that is printed first.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # one example uses parts of another

from examples.quickstart.commands import run

HERE = Path("examples/reasoning_gym")
RUNS = Path("runs/reasoning_gym")


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
