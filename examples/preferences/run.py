"""Learning from preferences, labels and steps on real text: every run file of this folder, in order.

Every step is a command that is printed before it runs, so each can be repeated and changed by hand.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # one example uses parts of another

from examples.quickstart.commands import execute, run

HERE = Path(__file__).resolve().parent
RUNS = Path("runs/preferences")
TASK = RUNS / "task"
WARM_START = (
    str(HERE.parent / "gsm8k" / "sft.toml"), "--run.output", str(RUNS / "sft"),
    "--model", str(TASK / "gsm8k" / "model"), "--data", str(TASK / "gsm8k" / "train.jsonl"),
)  # fmt: skip
PARTS = {
    "graded": ("sft", "reward_model", "kto", "kto_pairs"),
    "steps": ("sft", "prm", "prm_solutions"),
    "sampling": ("sft", "rejection_sampling"),
}
"""The runs of each part, in order; a run that several parts need is made once."""
SMALL = ("--run.steps", "2", "--data.batch_size", "4", "--trainer.warmup_steps", "0")
SMALL_EVAL = ("--eval.max_rows", "8")
SMALL_SAMPLES = ("--sampling.max_new_tokens", "16", "--algorithm.min_reward", "0")


def runs(parts: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(run for part in parts for run in PARTS[part]))


def command(run: str, small: bool) -> list[str]:
    file = WARM_START if run == "sft" else (str(HERE / f"{run}.toml"),)
    if not small:
        return ["rlhf", "train", *file]
    samples, evaluated = run == "rejection_sampling", run != "sft"  # the warm start has no held-out rows
    flags = (*SMALL, *(SMALL_SAMPLES if samples else ()), *(SMALL_EVAL if evaluated else ()))
    return ["rlhf", "train", *file, *flags]


def figures(run: str) -> dict[str, tuple[float, float]]:
    """{metric: (at the start, at the end)} of a run's metrics on held-out rows; empty if it has none."""
    lines = [json.loads(line) for line in (RUNS / run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    lines = [line for line in lines if any(name.startswith("eval/") for name in line)]
    if not lines:
        return {}
    first, last = lines[0], lines[-1]
    names = [name for name in first if name.startswith("eval/") and not name.startswith("eval/loss/") and name in last]
    return {name: (first[name], last[name]) for name in names}


def main(words: Sequence[str] | None = None, execute: Callable[[Sequence[str]], int] = execute) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", required=True, metavar="DIR", help="folder with the files that README.md names")
    parser.add_argument("--only", action="append", choices=PARTS, help="this part; may be given several times")
    parser.add_argument("--small", action="store_true", help="a few rows, steps and parameters: to try the commands")
    arguments = parser.parse_args(words)
    chosen = runs(arguments.only or list(PARTS))
    prepare = ["python", str(HERE / "prepare.py"), str(TASK), "--data", arguments.data]
    commands = [command(name, arguments.small) for name in chosen]
    shutil.rmtree(RUNS, ignore_errors=True)
    for step in ([*prepare, *(["--small"] if arguments.small else [])], *commands):
        run(*step, execute=execute)
    print("\nWithout a model, on all held-out rows; a run leaves out those over its limits or after eval.max_rows:")
    for baseline, value in json.loads((TASK / "baselines.json").read_text(encoding="utf-8")).items():
        print(f"  {baseline}: {value:.3f}")
    for name in chosen:
        for metric, (start, after) in figures(name).items():
            print(f"{name}  {metric.removeprefix('eval/')}: {start:.4g} -> {after:.4g}")


if __name__ == "__main__":
    main()
