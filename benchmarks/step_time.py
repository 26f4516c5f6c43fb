"""Step times of real runs, waves and continuous, compared with those that `rlhf plan --speeds` says from one of them.

    python benchmarks/step_time.py [--steps 24] [--folder FOLDER] [--output results/NAME.json]

A tiny model, sampled by a vLLM engine in a process of its own. Environments and optimizer steps sleep, so most of a
step does not depend on the processor. The plan is made from the timeline of the run in waves and nothing else.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from rlhf_cli.main import main as rlhf
from rlhf_runtime.output.metrics import read_metrics
from rlhf_testing.tiny import tiny_model
from stream import machine

PARTS = """
import asyncio
import random
import time

from rlhf.interfaces import Env
from rlhf.types import EnvStep
from rlhf_plugin_local.trainer import TorchTrainer


class Slow(Env):
    '''Each step takes a log-normal time.'''

    name = "slow"

    async def reset(self, row, seed):
        self.steps = 0
        return ""

    async def step(self, action):
        await asyncio.sleep(random.lognormvariate({location}, 0.8))
        self.steps += 1
        return EnvStep("more", random.random(), self.steps == {turns})


class SlowTrainer(TorchTrainer):
    '''Each optimizer step takes {learn} seconds more.'''

    name = "slow"

    def apply(self):
        time.sleep({learn})
        return super().apply()
"""
WARM_UP, ENDING = 5, 4
"""Steps that are not counted: the stream is filled, and no further prompts are drawn for the last ones."""
MEASURED = "waves, staleness 0"
"""The run that the plan is made from."""
WORKLOADS: dict[str, dict[str, Any]] = {
    "3 turns of 0.5 s, learning 2 s": {"location": -1.0, "turns": 3, "learn": 2.0},
    "1 turn of 1.4 s, learning 1 s": {"location": 0.0, "turns": 1, "learn": 1.0},
}
LAYOUTS: dict[str, tuple[str, ...]] = {
    "waves, staleness 0": (),
    "waves, staleness 1": ("--stream.staleness", "1"),
    "continuous, staleness 0": ("--stream.mode", "continuous"),
    "continuous, staleness 1": ("--stream.mode", "continuous", "--stream.staleness", "1"),
    "continuous, staleness 2": ("--stream.mode", "continuous", "--stream.staleness", "2"),
    "continuous, staleness 4": ("--stream.mode", "continuous", "--stream.staleness", "4"),
}


def flags(folder: Path) -> list[str]:
    values = {
        "algo": "grpo",
        "model": folder / "model",
        "data": folder / "data.jsonl",
        "policy.dtype": "fp32",
        "launcher.use": "processes",
        "launcher.cpus": 2,
        "trainer.use": f"file:{folder / 'parts.py'}:SlowTrainer",
        "generator.use": "vllm",
        "generator.kv_cache_gib": 0.25,
        "rollout.use": "multi_turn",
        "env.use": f"file:{folder / 'parts.py'}:Slow",
        "sampling.samples_per_prompt": 4,
        "sampling.max_new_tokens": 40,
        "data.batch_size": 8,
        "data.max_tokens": 400,
        "algorithm.loss.correction.preset": "tis",
    }
    return [str(word) for name, value in values.items() for word in (f"--{name}", value)]


def measure(folder: Path, layout: str, count: int) -> dict[str, float]:
    """Means over the counted steps; in waves the idle time of engines is not known. A run that ``folder`` holds is not
    made again."""
    run = ["--run.steps", str(count), "--run.timeline", str(count), "--run.output", str(folder / layout)]
    command = [sys.executable, "-m", "rlhf_cli.main", "train", *flags(folder), *LAYOUTS[layout], *run]
    if not (folder / layout / "model").exists():
        subprocess.run([*command, "--run.overwrite"], check=True, stdout=subprocess.DEVNULL)
    lines = read_metrics(folder / layout / "metrics.jsonl")[WARM_UP:-ENDING]
    steps = [line["time/step"] for line in lines]
    step, error = statistics.fmean(steps), statistics.stdev(steps) / len(steps) ** 0.5
    idle = [line["stream/idle"] for line in lines if "stream/idle" in line]
    learn = statistics.fmean(line["time/learn"] for line in lines)
    figures = {"step": step, "standard error": error, "trainer idle": 1 - learn / step}
    return figures | ({"engines idle": statistics.fmean(idle)} if idle else {})


def planned(folder: Path) -> dict[str, dict[str, Any]]:
    """The layouts of the plan that is made from the run in waves."""
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        rlhf(["plan", *flags(folder), "--speeds", str(folder / MEASURED), "--json"])
    return {layout["name"]: layout for layout in json.loads(text.getvalue())["step_time"]["layouts"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=24, help=f"of each run; {WARM_UP + ENDING} are not counted")
    parser.add_argument("--folder", type=Path, help="keep the runs here; those that are here are not made again")
    parser.add_argument("--output", type=Path, help="also write the figures here, as JSON")
    options = parser.parse_args()
    if options.steps < WARM_UP + ENDING + 2:
        parser.error(f"--steps {options.steps}: {WARM_UP + ENDING} are not counted, and two at least must be")
    results: dict[str, Any] = {"machine": {name: value for name, value in machine().items() if name != "load"}}
    columns = ["workload", "layout", "run, s/step", "plan, s/step", "plan / run"]
    columns += ["trainer idle, run", "trainer idle, plan", "engines idle, run", "engines idle, plan"]
    print(f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|")
    for number, (name, values) in enumerate(WORKLOADS.items()):
        with tempfile.TemporaryDirectory() as text:
            folder = (options.folder or Path(text)) / str(number)
            folder.mkdir(parents=True, exist_ok=True)
            tiny_model(folder / "model", hidden=32, heads=2, kv_heads=1, head_dim=32)
            rows = [{"prompt": f"{n}=", "answer": str(n)} for n in range(1000)]
            (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
            (folder / "parts.py").write_text(PARTS.format(**values))
            runs = {layout: measure(folder, layout, options.steps) for layout in LAYOUTS}
            plan = planned(folder)
        results[name] = {layout: {"run": runs[layout], "plan": plan[layout]} for layout in LAYOUTS}
        for layout, run in runs.items():
            of_plan = plan[layout]
            row = [name, layout, f"{run['step']:.2f} ± {run['standard error']:.2f}", f"{of_plan['step']:.2f}"]
            row += [f"{of_plan['step'] / run['step']:.2f}"]
            for part in ("trainer", "engines"):
                share = run.get(f"{part} idle")
                row += ["" if share is None else f"{share:.0%}", f"{of_plan[f'{part}_idle']:.0%}"]
            print(f"| {' | '.join(row)} |")
    if options.output is not None:
        options.output.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
