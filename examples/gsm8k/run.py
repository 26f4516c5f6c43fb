"""GSM8K from nothing: a tokenizer and a small model made from the data, supervised fine-tuning, then GRPO.

Every step is a command that is printed before it runs, so each can be repeated and changed by hand.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # one example uses parts of another

from examples.quickstart.commands import execute, run

HERE = Path(__file__).resolve().parent
RUNS = Path("runs/gsm8k")


SMALL = {
    "sft": ("--run.steps", "80", "--trainer.lr", "4e-3"),
    "grpo": ("--run.steps", "8", "--trainer.lr", "5e-4"),
}
"""Options of --small (a smaller model, fewer steps), by run file."""
SMALL_ANSWERS = ("--sampling.max_new_tokens", "64")
SMALL_ROWS = 96


def train(name: str, small: bool) -> list[str]:
    flags = (*SMALL[name], "--policy.dtype", "fp32") if small else ()
    sampled = (*SMALL_ANSWERS, "--eval.max_rows", str(SMALL_ROWS)) if small and name == "grpo" else ()
    return ["rlhf", "train", str(HERE / f"{name}.toml"), *flags, *sampled]


def answers(name: str) -> Path:
    return RUNS / f"answers-{name}.jsonl"


def evaluate(name: str, small: bool, rows: int) -> list[str]:
    flags = (*SMALL_ANSWERS, "--policy.dtype", "fp32") if small else ()
    model = str(RUNS / name / "model")
    return [
        "rlhf", "eval", str(HERE / "grpo.toml"), "--model", model, "--eval.max_rows", str(rows),
        "--save", str(answers(name)), *flags,
    ]  # fmt: skip


def rates(name: str) -> dict[str, float]:
    """Share of sampled answers to held-out questions that each reward accepts, by the reward's name."""
    with answers(name).open(encoding="utf-8") as file:
        scored = [json.loads(line)["rewards"] for line in file]
    return {reward: sum(rewards[reward]["value"] for rewards in scored) / len(scored) for reward in ("math", "format")}


def main(words: Sequence[str] | None = None, execute: Callable[[Sequence[str]], int] = execute) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", required=True, metavar="DIR|hub", help="folder with the two files, or `hub`")
    parser.add_argument(
        "--small", action="store_true", help="short rows, a smaller model and fewer steps: to try the commands"
    )
    arguments = parser.parse_args(words)
    small, start = arguments.small, time.perf_counter()
    prepare = ["python", str(HERE / "prepare.py"), str(RUNS / "task"), "--data", arguments.data]
    names, rows = ("sft", "grpo"), SMALL_ROWS if small else 400
    shutil.rmtree(RUNS, ignore_errors=True)
    for command in (
        [*prepare, *(["--small"] if small else [])],
        *(train(name, small) for name in names),
        *(evaluate(name, small, rows) for name in names),
    ):
        run(*command, execute=execute)
    base, after = map(rates, names)
    print(
        f"\nDone in {time.perf_counter() - start:.0f} s. The model is in {RUNS / 'grpo' / 'model'}.\n"
        f"held-out answers that are right: {base['math']:.3f} -> {after['math']:.3f}\n"
        f"held-out answers that end in '#### number': {base['format']:.2f} -> {after['format']:.2f}"
    )


if __name__ == "__main__":
    main()
