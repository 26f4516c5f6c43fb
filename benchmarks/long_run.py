"""Whether a run of many steps grows: memory, descriptors, threads, processes, time, and files, over its steps.

    python benchmarks/long_run.py --steps 2000

A tiny model learns with GRPO on four prompts a step, evaluates and saves every tenth of the steps. This file is also
the observer of the run, which counts at the end of every tenth. The last step is made by a resume, which is timed. All
time is processor time, so other work on the machine changes it little.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlhf.interfaces import ComponentConfig, Observer, RunInfo

PARTS = 10
REWARD = """
async def score(prompt, completion, row):
    return sum(c in "0123456789" for c in completion) / 6
"""


class GrowthConfig(ComponentConfig):
    every: int = 200
    """Steps between two counts."""
    file: str = ""
    """Gets a line of JSON for each count."""


class Growth(Observer):
    """Counts what the run's process holds."""

    name = "growth"
    Config = GrowthConfig

    def run_started(self, info: RunInfo) -> None:
        self._folder, self._step, self._seconds = info.output, info.first_step, time.process_time()

    def step_finished(self, step: int, metrics: Mapping[str, float]) -> None:
        if step % self.config.every:
            return
        seconds = (time.process_time() - self._seconds) / (step - self._step)
        gc.collect()
        objects = sys.getallocatedblocks()  # before the list of files, which has some for each file
        sizes = [file.stat().st_size for file in self._folder.rglob("*") if file.is_file()]
        count = {
            "step": step,
            "ms of a step": round(1000 * seconds, 1),
            "MiB written": round(_written_kib() / 1024, 1),
            "objects": objects,
            "descriptors": len(os.listdir("/proc/self/fd")),
            "threads": threading.active_count(),
            "processes": len(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()),
            "files": len(sizes),
            "MiB of files": round(sum(sizes) / 2**20, 2),
        }
        with Path(self.config.file).open("a") as lines:
            lines.write(json.dumps(count) + "\n")
        self._step, self._seconds = step, time.process_time()


def _written_kib() -> int:
    """Memory that this process has written. Pages of files are left out: other processes may share them or not."""
    lines = [line.split() for line in Path("/proc/self/smaps_rollup").read_text().splitlines()]
    return sum(int(words[1]) for words in lines if words[0] == "Private_Dirty:")


def train(folder: Path, steps: int, *flags: str) -> None:
    from rlhf_cli.main import main

    every = str(steps // PARTS)
    words = ["train", "--algo", "grpo", "--quiet", "--output", str(folder / "run"), "--steps", str(steps)]
    words += ["--model", str(folder / "model"), "--data", str(folder / "rows.jsonl")]
    words += ["--eval-data", str(folder / "rows.jsonl"), "--eval.every", every, "--eval.max_rows", "3"]
    words += ["--reward", f"file:{folder / 'reward.py'}", "--data.batch_size", "4", "--data.max_tokens", "64"]
    words += ["--sampling.samples_per_prompt", "3", "--sampling.max_new_tokens", "6", "--trainer.lr", "1e-3"]
    words += ["--policy.dtype", "fp32", "--run.threads", "1", "--checkpoint.every", every, "--checkpoint.keep", "2"]
    words += ["--observer", f"file:{Path(__file__).resolve()}", "--observer.0.every", every]
    words += ["--observer.0.file", str(folder / "counts.jsonl"), *flags]
    if code := main(words):
        raise SystemExit(code)


def main() -> None:
    from rlhf_testing.tiny import tiny_model

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000, help=f"a multiple of {PARTS}")
    steps = parser.parse_args().steps
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        tiny_model(folder / "model", hidden=16, heads=2, kv_heads=1)
        (folder / "rows.jsonl").write_text("".join(json.dumps({"prompt": f"{a}+1="}) + "\n" for a in range(10)))
        (folder / "reward.py").write_text(REWARD)
        train(folder, steps, "--run.stop_after", str(steps - 1))
        start = time.process_time()
        train(folder, steps, "--resume")
        seconds = time.process_time() - start
        counts: list[dict[str, Any]] = [json.loads(line) for line in (folder / "counts.jsonl").read_text().splitlines()]
        newest = max((folder / "run" / "checkpoints").glob("step-*"))
        size = sum(file.stat().st_size for file in newest.rglob("*") if file.is_file())
    print(f"| {' | '.join(counts[0])} |\n|{'---|' * len(counts[0])}")
    for count in counts:
        print(f"| {' | '.join(map(str, count.values()))} |")
    print(f"\ncheckpoint of step {steps}: {size} bytes; resume with its last step: {seconds:.1f} s of processor time")


if __name__ == "__main__":
    main()
