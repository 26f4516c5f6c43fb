"""Run one recipe from nothing: `python examples/recipes/run.py rejection_sampling`, from the root of the repository.

Every step is an `rlhf` command that is printed before it runs, so each can be repeated and changed by hand. The task
and the warm start are made once and shared.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import shutil
import sys
import time
import tomllib
from collections.abc import Sequence
from pathlib import Path

from make_task import make
from rlhf_cli.main import main as rlhf

HERE = Path("examples/recipes")
RUNS = Path("runs/recipes")
TASK = RUNS / "task"
WARM_START = RUNS / "warm_start" / "model"
STOPPED = 130
"""Exit code of `rlhf` after a Ctrl-C."""
REWARD = ("--reward", f"file:{HERE / 'reward.py'}")
ANSWER = ("--sampling.max_new_tokens", "6", "--data.max_tokens", "40", "--eval.temperature", "1")


def run(*words: str) -> str:
    """Run one `rlhf` command in this process. Returns its output; ends the program if it fails."""
    print(f"\n$ rlhf {' '.join(word if ' ' not in word else repr(word) for word in words)}", flush=True)
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        code = rlhf(words)
    print(out.getvalue(), end="", flush=True)
    if code:
        sys.exit("stopped" if code == STOPPED else f"`rlhf {' '.join(words)}` failed; the message above says why")
    return out.getvalue()


def shorter(steps: int | None) -> tuple[str, ...]:
    return () if steps is None else ("--steps", str(steps))


def warm_start_steps() -> int:
    """Steps of the warm start; 0 if there is none. One that was stopped, or had --steps, has a model too."""
    if not WARM_START.exists():
        return 0
    return json.loads((WARM_START.parent / "metrics.jsonl").read_text().splitlines()[-1])["step"]


def prepare(steps: int | None) -> None:
    """Make the task if it does not exist, and the model that imitates its demonstrations if it has too few steps."""
    if not (TASK / "model").exists():
        print(f"\nmaking the task in {TASK}", flush=True)
        make(TASK)
    if warm_start_steps() < (steps or tomllib.loads((HERE / "warm_start.toml").read_text())["run"]["steps"]):
        shutil.rmtree(WARM_START.parent, ignore_errors=True)
        run("train", str(HERE / "warm_start.toml"), *shorter(steps))


def online(name: str, steps: int | None) -> str:
    """A recipe that is one run: the same run samples, scores, chooses and trains."""
    run("train", str(HERE / f"{name}.toml"), *shorter(steps))
    lines = [json.loads(line) for line in (RUNS / name / "metrics.jsonl").read_text().splitlines()]
    first, *_, last = [line for line in lines if "eval/reward" in line]
    start, after = (f"{line['eval/reward']:.2f} (all right: {line['eval/pass@1']:.2f})" for line in (first, last))
    return f"held-out reward: {start} -> {after}"


def conditional_sft(name: str, steps: int | None) -> str:
    """Sample and score, write rewards into prompts, fine-tune, and prompt for good answers."""
    folder = RUNS / name
    folder.mkdir(parents=True)
    samples, data, rows = folder / "samples.jsonl", folder / "conditional.jsonl", "1000" if steps is None else "60"
    sampled = ("--eval.samples", "4", "--eval.max_rows", rows, "--save", str(samples))
    run("eval", "--model", str(WARM_START), "--data", str(TASK / "problems.jsonl"), *REWARD, *ANSWER, *sampled)
    run("data", "export", str(samples), "--form", "conditional", "-o", str(data))
    run("train", str(HERE / f"{name}.toml"), *shorter(steps))
    rewards = [json.loads(line)["reward"] for line in data.read_text().splitlines()]
    texts = [f"{reward:.2f} -> {answered(folder, reward):.2f}" for reward in (min(rewards), 0.0, max(rewards), 5.0)]
    return f"held-out reward by the reward that is asked for: {', '.join(texts)}"


def answered(folder: Path, reward: float) -> float:
    """Reward of the answers to held-out prompts that ask for a reward."""
    condition = ("--data.input_template", f"{{prompt}} <rm_score>: {reward:.2f} ")
    model = folder / "run" / "model"
    words = ("eval", "--model", str(model), "--data", str(TASK / "held_out.jsonl"), *REWARD, *ANSWER, *condition)
    return json.loads(run(*words, "--json"))["reward"]


RECIPES = {
    "rejection_sampling": online,
    "iterative_dpo": online,
    "online_dpo": online,
    "dapo": online,
    "conditional_sft": conditional_sft,
}


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("recipe", choices=RECIPES)
    parser.add_argument("--steps", type=int, help="steps of every training; fewer show less (default: the run files')")
    args = parser.parse_args(words)
    start = time.perf_counter()
    prepare(args.steps)
    shutil.rmtree(RUNS / args.recipe, ignore_errors=True)
    result = RECIPES[args.recipe](args.recipe, args.steps)
    print(f"\n{args.recipe}, in {time.perf_counter() - start:.0f} s. {result}")


if __name__ == "__main__":
    main()
