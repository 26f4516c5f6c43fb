"""Train a real chat model, SmolLM2-135M-Instruct, to count: which number comes after 58? Run by `make quickstart`.

Untrained, it answers most of these questions wrong. GRPO trains it on two thirds of the numbers with two digits; the
reward reads only the number in the answer. The test has the other third and three-digit numbers, which are not in the
training data. It allows 64 tokens and training 16, so a model that only learned to be brief gains nothing.

Every step is a command that is printed before it runs, so each can be repeated and changed by hand. Words after
`quickstart.py` go to `rlhf train`: `quickstart.py --steps 60`.
"""

from __future__ import annotations

import json
import random
import shlex
import shutil
import sys
import time
from pathlib import Path

import curve
import tiny
from commands import run
from room import problems
from smollm2 import NotFetchedError, get_model

HERE = Path(__file__).parent
RUNS = Path("runs/quickstart")
TASK, RUN = RUNS / "task", RUNS / "grpo"
HELD_OUT = 30
THREE_DIGITS = 20


def question(number: int) -> str:
    return f"What number comes after {number}? Answer with the number only."


def make_task() -> list[int]:
    """Write the rows: questions with their answers. Returns the numbers that are held out."""
    numbers = list(range(10, 100))
    random.Random(0).shuffle(numbers)
    parts = {
        "held_out": numbers[:HELD_OUT],
        "train": sorted(numbers[HELD_OUT:]),
        "three_digits": sorted(random.Random(0).sample(range(100, 999), THREE_DIGITS)),
    }
    TASK.mkdir(parents=True)
    for name, part in parts.items():
        rows = [{"prompt": question(number), "answer": str(number + 1)} for number in part]
        (TASK / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return parts["held_out"]


def answer(model: Path, numbers: list[int]) -> None:
    prompts = [word for number in numbers for word in ("--prompt", question(number))]
    run("rlhf", "generate", "--model", str(model), *prompts, "--sampling.max_new_tokens", "64")


def result(source: str) -> str:
    """The share of right answers to a file of questions, before training and after it."""
    lines = [json.loads(line) for line in (RUN / "metrics.jsonl").read_text().splitlines()]
    shares = [line[f"eval/{source}/pass@1"] for line in lines if f"eval/{source}/pass@1" in line]
    return f"{shares[0]:.2f} -> {shares[-1]:.2f}"


def main(flags: list[str]) -> None:
    start = time.perf_counter()
    if small := problems(RUNS):
        sys.exit("\n".join(small))
    try:
        model = get_model()
    except NotFetchedError as problem:
        print(f"{problem}\nA tiny model of our own is trained instead. It needs no download.")
        if flags:
            print(f"Its training does not use {shlex.join(flags)}.")
        tiny.main()
        return
    shutil.rmtree(RUNS, ignore_errors=True)
    held_out = make_task()
    print("\nThree of the held-out questions, before training:")
    answer(model, held_out[:3])
    run("rlhf", "train", str(HERE / "grpo.toml"), "--model", str(model), *flags)
    print("\nThe same questions, after training:")
    answer(RUN / "model", held_out[:3])
    curve.write(RUN, RUN / "curve.svg", "SmolLM2-135M-Instruct learns which number comes next")
    print(
        f"""
Done in {time.perf_counter() - start:.0f} s. Share of correct answers (at most 64 tokens) before and after training:
  {result("held_out")}   {HELD_OUT} held-out two-digit numbers
  {result("three_digits")}   {THREE_DIGITS} three-digit numbers (none in training)

The run is in {RUN}: the curve is curve.svg, every sample is in rollouts/, and model/ loads with transformers.
Try next:
  .venv/bin/rlhf samples {RUN} --worst 5
  .venv/bin/rlhf generate --model {RUN}/model --prompt "What is the capital of France?"
  .venv/bin/rlhf train examples/quickstart/grpo.toml --model {model} --algo rloo --output runs/by-rloo
  .venv/bin/rlhf plugins list"""
    )


if __name__ == "__main__":
    main(sys.argv[1:])
