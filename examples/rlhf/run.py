"""The whole pipeline, from the root of the repository: fine-tuning, a reward model, PPO, GRPO and DPO, and their table.

Every step is a command that is printed before it runs, so each can be repeated and changed by hand. A finished stage
is not run again, and a stage that was stopped continues from its last checkpoint.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from rlhf_cli.main import main as rlhf

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # one example uses parts of another

from examples.quickstart import commands
from examples.quickstart.commands import execute

HERE = Path("examples/rlhf")
RUNS = Path("runs/rlhf")
MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
STAGES = ("sft", "reward_model", "ppo", "grpo", "dpo")
SAMPLING = ("ppo", "grpo")
RESULTS = ("sft", "ppo", "grpo", "dpo", "before")
ONLINE = ("--data.batch_size", "4", "--sampling.max_new_tokens", "32")
SMALL = {
    "prepare": ("--prompt-tokens", "128", "--answer-tokens", "48"),
    "reward_model": ("--run.steps", "40"),
    "ppo": ("--run.steps", "10", "--trainer.lr", "5e-5", *ONLINE),
    "grpo": ("--run.steps", "10", "--trainer.lr", "5e-5", *ONLINE),
    "dpo": ("--run.steps", "20", "--trainer.lr", "2e-5"),
    "eval": ("--sampling.max_new_tokens", "32", "--eval.max_rows", "48"),
}
"""Flags of `--size small`, by step. `--size full` is the run files as they are."""


def prepare(data: str, model: str, flags: Sequence[str]) -> list[str]:
    return ["python", str(HERE / "prepare.py"), str(RUNS / "task"), "--data", data, "--model", model, *flags]


def train(stage: str, model: str, flags: Sequence[str]) -> list[str]:
    start = ("--model", model) if stage == "sft" else ()
    mode = "--resume" if (RUNS / stage / "checkpoints").exists() else "--overwrite"
    return ["rlhf", "train", str(HERE / f"{stage}.toml"), *start, *flags, mode]


def evaluate(name: str, model: str, flags: Sequence[str]) -> list[str]:
    return ["rlhf", "eval", str(HERE / "eval.toml"), "--model", model, *flags, "--save", str(answers(name))]


def answers(name: str) -> Path:
    return RUNS / "answers" / f"{name}.jsonl"


def finished(folder: Path) -> bool:
    """Whether this run trained all its steps. A run that was stopped has a model too."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        code = rlhf(["runs", str(folder), "--json"]) if folder.exists() else 1
    return code == 0 and any(record["state"] == "finished" for record in json.loads(out.getvalue()))


def check_settings(settings: Mapping[str, str | int | None]) -> None:
    """Ends the program if RUNS holds stages of other settings: they would pass for stages of these."""
    path = RUNS / "settings.json"
    if not path.exists():
        RUNS.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(settings) + "\n", encoding="utf-8")
    earlier = json.loads(path.read_text(encoding="utf-8"))
    if earlier != settings:
        earlier_flags, flags = (
            " ".join(f"--{name} {value}" for name, value in values.items() if value is not None)
            for values in (earlier, settings)
        )
        sys.exit(
            f"{RUNS} holds stages of `{earlier_flags}`, got `{flags}`. Move or delete {RUNS}, or give the same flags "
            "again"
        )


def main(words: Sequence[str] | None = None, execute: Callable[[Sequence[str]], int] = execute) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", required=True, metavar="DIR|hub", help="folder with the pairs of HH, or `hub`")
    parser.add_argument("--model", default=MODEL, help=f"a folder or a hub name; default {MODEL}")
    parser.add_argument("--size", choices=("small", "full"), default="small", help="minutes a stage, or a night")
    parser.add_argument("--only", choices=(*STAGES, "compare"), help="this stage only, or the models so far")
    parser.add_argument("--steps", type=int, help="steps of every stage: to try the commands")
    parser.add_argument("--rows", type=int, help="only the first rows of the data: to try the commands")
    parser.add_argument("more", nargs="*", metavar="-- FLAG", help="more flags of PPO, GRPO and the evaluation")
    arguments = parser.parse_args(words)
    if arguments.more and not arguments.more[0].startswith("--"):
        parser.error(f"unknown argument {arguments.more[0]!r}; flags of PPO, GRPO and the evaluation stand after `--`")
    if arguments.more and arguments.only not in (None, "compare", *SAMPLING):
        parser.error(
            f"flags after `--` are for {' and '.join(SAMPLING)} and the evaluation, --only is {arguments.only}"
        )
    check_settings({name: vars(arguments)[name] for name in ("model", "size", "steps", "rows")})
    flags = SMALL if arguments.size == "small" else {}
    steps = ("--run.steps", str(arguments.steps)) if arguments.steps else ()
    rows = ("--rows", str(arguments.rows)) if arguments.rows else ()

    def run(result: Path | None, command: Sequence[str]) -> None:
        if result is not None and (finished(result) if result.parent == RUNS else result.exists()):
            print(f"\n{result} exists", flush=True)
            return
        start = time.perf_counter()
        commands.run(*command, execute=execute, after_stop="The same command continues")
        print(f"{time.perf_counter() - start:.0f} s", flush=True)

    run(RUNS / "task" / "held_out.jsonl", prepare(arguments.data, arguments.model, (*flags.get("prepare", ()), *rows)))
    for stage in STAGES if arguments.only is None else {arguments.only} - {"compare"}:
        extra = arguments.more if stage in SAMPLING else ()
        run(RUNS / stage, train(stage, arguments.model, (*flags.get(stage, ()), *steps, *extra)))
    if arguments.only not in (None, "compare"):
        return
    (RUNS / "answers").mkdir(exist_ok=True)
    for name in RESULTS:
        model = arguments.model if name == "before" else str(RUNS / name / "model")
        if name == "before" or finished(RUNS / name):
            run(answers(name), evaluate(name, model, (*flags.get("eval", ()), *arguments.more)))
    run(None, ["python", str(HERE / "compare.py")])


if __name__ == "__main__":
    main()
