"""Warm-start a tiny model on flawed demonstrations, then train it with RLOO to add. Run by `make quickstart-tiny`.

It downloads nothing. `make quickstart` does it too where the real model cannot be downloaded.
"""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path

from commands import run

HERE = Path(__file__).parent
RUNS = Path("runs/quickstart-tiny")


def accuracy(step: int | None = None) -> float:
    """Held-out accuracy of the RLOO run at ``step``; None: at its last evaluation."""
    lines = [json.loads(line) for line in (RUNS / "rloo" / "metrics.jsonl").read_text().splitlines()]
    evaluated = [line for line in lines if "eval/pass@1" in line]
    return evaluated[0 if step == 0 else -1]["eval/pass@1"]


def main() -> None:
    start = time.perf_counter()
    shutil.rmtree(RUNS, ignore_errors=True)
    run("python", str(HERE / "tiny_task.py"), str(RUNS / "task"))
    run("rlhf", "train", str(HERE / "tiny_sft.toml"))
    run("rlhf", "train", str(HERE / "tiny_rloo.toml"))
    seconds = time.perf_counter() - start
    model = RUNS / "rloo" / "model"
    print(
        f"\nTrained in {seconds:.0f} s. The model is in {model} (loads with transformers). Try next:\n"
        f'  .venv/bin/rlhf generate --model {model} --prompt "47+38=" --sampling.max_new_tokens 4\n'
        f"  .venv/bin/rlhf train examples/quickstart/tiny_rloo.toml --algo grpo --run.output {RUNS / 'grpo'}\n"
        "  .venv/bin/rlhf plugins list\n"
        "  .venv/bin/rlhf plugins new my_reward --kind reward\n"
        f"held-out accuracy: {accuracy(0):.2f} -> {accuracy():.2f}"
    )


if __name__ == "__main__":
    main()
