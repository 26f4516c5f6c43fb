"""Train an agent that knows nothing of rlhf: `python examples/agent/run.py`, from the root of the repository.

Every step is an `rlhf` command that is printed before it runs, so each can be repeated and changed by hand.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from importlib.util import find_spec
from pathlib import Path

from make_task import make
from rlhf_cli.main import main as rlhf

HERE, RUNS = Path("examples/agent"), Path("runs/agent")


def run(*words: str) -> None:
    print(f"\n$ rlhf {' '.join(words)}", flush=True)
    if code := rlhf(words):
        stopped = code == 130  # by a Ctrl-C
        sys.exit("stopped" if stopped else f"`rlhf {' '.join(words)}` failed; the message above says why")


def main() -> None:
    if find_spec("openai") is None:
        sys.exit(
            f"the agent of this example uses the package openai. Install it: {sys.executable} -m pip install openai"
        )
    start = time.perf_counter()
    shutil.rmtree(RUNS, ignore_errors=True)
    make(RUNS / "task")
    run("train", str(HERE / "warm_start.toml"))
    run("train", str(HERE / "rloo.toml"), *sys.argv[1:])
    lines = [json.loads(line) for line in (RUNS / "rloo" / "metrics.jsonl").read_text().splitlines()]
    held_out = [(line["step"], line["eval/pass@1"]) for line in lines if "eval/pass@1" in line]
    print(f"\n{time.perf_counter() - start:.0f} s")
    print("held-out success: " + ", ".join(f"step {step}: {share:.2f}" for step, share in held_out))


if __name__ == "__main__":
    main()
