"""Warm-start a tiny model on flawed demonstrations, then train it with RLOO to add correctly. Run by `make quickstart`.

Every step is an `rlhf` command that is printed before it runs, so each can be repeated and changed by hand.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
RUNS = Path("runs/quickstart")


def run(*command: str) -> None:
    """Print a command and run it with this Python's `rlhf`; end the program if it fails."""
    print(f"\n$ {' '.join(command)}", flush=True)
    words = [sys.executable, *(("-m", "rlhf_cli.main") if command[0] == "rlhf" else ()), *command[1:]]
    child, stopped = subprocess.Popen(words), False
    while child.returncode is None:
        try:
            child.wait()
        except KeyboardInterrupt:  # the child process gets the signal too, finishes its step and saves
            stopped = True
    if stopped:
        sys.exit("stopped. `make quickstart` starts anew")
    if child.returncode:
        sys.exit(f"`{' '.join(command)}` failed; the message above says why")


def accuracy(step: int | None = None) -> float:
    """Held-out accuracy of the RLOO run at ``step``; None: at its last evaluation."""
    lines = [json.loads(line) for line in (RUNS / "rloo" / "metrics.jsonl").read_text().splitlines()]
    evaluated = [line for line in lines if "eval/pass@1" in line]
    return evaluated[0 if step == 0 else -1]["eval/pass@1"]


def main() -> None:
    start = time.perf_counter()
    shutil.rmtree(RUNS, ignore_errors=True)
    run("python", str(HERE / "make_task.py"), str(RUNS / "task"))
    run("rlhf", "train", str(HERE / "sft.toml"))
    run("rlhf", "train", str(HERE / "rloo.toml"))
    seconds = time.perf_counter() - start
    model = RUNS / "rloo" / "model"
    print(
        f"\nTrained in {seconds:.0f} s. The model is in {model} (loads with transformers). Try next:\n"
        f'  .venv/bin/rlhf generate --model {model} --prompt "47+38=" --sampling.max_new_tokens 4\n'
        "  .venv/bin/rlhf train examples/quickstart/rloo.toml --algo grpo --run.output runs/quickstart/grpo\n"
        "  .venv/bin/rlhf plugins list\n"
        "  .venv/bin/rlhf plugins new my_reward --kind reward\n"
        f"held-out accuracy: {accuracy(0):.2f} -> {accuracy():.2f}"
    )


if __name__ == "__main__":
    main()
