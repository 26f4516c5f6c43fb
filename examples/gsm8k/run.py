"""GSM8K from nothing: a tokenizer and a small model made from the data, supervised fine-tuning, then GRPO.

Every step is a command that is printed before it runs, so each can be repeated and changed by hand.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
RUNS = Path("runs/gsm8k")


def run(*command: str) -> None:
    """Run a command with this Python's `rlhf`, showing it first; stop where it fails."""
    print(f"\n$ {' '.join(command)}", flush=True)
    words = [sys.executable, *(("-m", "rlhf_cli.main") if command[0] == "rlhf" else ()), *command[1:]]
    if subprocess.run(words, check=False).returncode:
        sys.exit(f"`{' '.join(command)}` failed; the message above says why")


def rates(model: Path, rows: int) -> dict[str, float]:
    """Share of sampled answers to held-out questions that each reward accepts, by the reward's name."""
    answers = RUNS / f"answers-{model.parent.name}.jsonl"
    run(
        "rlhf", "eval", str(HERE / "grpo.toml"), "--model", str(model),
        "--eval.max_rows", str(rows), "--save", str(answers),
    )  # fmt: skip
    scored = [json.loads(line)["rewards"] for line in answers.read_text().splitlines()]
    return {name: sum(rewards[name]["value"] for rewards in scored) / len(scored) for name in ("math", "format")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", required=True, metavar="DIR|hub", help="folder with the two files, or `hub`")
    parser.add_argument("--sft-steps", type=int, help="fewer steps than sft.toml's, to try the commands")
    parser.add_argument("--grpo-steps", type=int, help="fewer steps than grpo.toml's")
    parser.add_argument("--eval-rows", type=int, default=400, help="held-out questions")
    arguments = parser.parse_args()
    start = time.perf_counter()
    shutil.rmtree(RUNS, ignore_errors=True)
    run("python", str(HERE / "prepare.py"), str(RUNS / "task"), "--data", arguments.data)
    for name, steps in (("sft", arguments.sft_steps), ("grpo", arguments.grpo_steps)):
        rows = ("--eval.max_rows", str(min(200, arguments.eval_rows))) if name == "grpo" else ()
        run("rlhf", "train", str(HERE / f"{name}.toml"), *(("--run.steps", str(steps)) if steps else ()), *rows)
    before, after = (rates(RUNS / name / "model", arguments.eval_rows) for name in ("sft", "grpo"))
    print(
        f"\nDone in {time.perf_counter() - start:.0f} s. The model is in {RUNS / 'grpo' / 'model'}.\n"
        f"held-out answers that are right: {before['math']:.3f} -> {after['math']:.3f}\n"
        f"held-out answers that end in '#### number': {before['format']:.2f} -> {after['format']:.2f}"
    )


if __name__ == "__main__":
    main()
