"""GRPO and SFT, whole steps of ours and of TRL in alternation: the scripts of ``make bench`` at a 0.5B-class shape, on
the device, as many repeats as the time allows.

Before anything is timed, both must compute the same gradients on the same batches, as in ``make bench``.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from functools import cache, partial
from pathlib import Path
from typing import Any

import machine
import shapes
from parts import NotRun, Part, Section

BENCHMARKS = Path(__file__).resolve().parents[1]
LARGE: dict[str, Any] = {
    "PROMPTS": 16,
    "SAMPLES": 8,
    "MAX_NEW_TOKENS": 128,
    "ROWS": 16,
    "SHORTEST": 64,
    "LONGEST": 1024,
}
TINY: dict[str, Any] = {"PROMPTS": 2, "SAMPLES": 2, "MAX_NEW_TOKENS": 8, "ROWS": 4, "SHORTEST": 20, "LONGEST": 40}
WORKLOADS = ("grpo-forced", "sft", "grpo-natural")
VARIANTS: dict[str, dict[str, Any]] = {
    "ours": {},
    "ours, head in bf16": {"trainer": {"head_fp32": False}},
    "ours, large micro-batches": {
        "trainer": {"head_fp32": False},
        "policy": {"micro_tokens": 32768},
    },
}
"""The first arm has the default options. The others are timed once if there is time left, and show faster options on a
GPU: TRL's head is in bf16 too."""
GATE_CUDA = 1e-4
"""Largest distance of the gradients of ours and TRL in fp32, relative to their norm. It is 1e-5 on a processor, where
attention has the same precision in both. On a GPU torch uses other kernels for padded rows than for packed ones."""


def run(section: Section) -> None:
    if section.device == "cuda":
        section.part("rates", partial(rates, section))
    os.environ["BENCH_THREADS"] = str(_threads())
    bench = _bench()
    gate_folder, folder = section.work / "gate", section.work / "arms"
    section.part("the same gradients as TRL", partial(gate, section, bench, gate_folder), seconds=60)
    _settings(section.small)
    section.part("model and data", lambda _: bench.execute(sys.executable, "model.py", str(folder)), seconds=20)
    arms = Arms(section, bench, folder)
    for workload in WORKLOADS:
        section.part(workload, partial(arms.compare, workload), seconds=30)


def rates(section: Section, part: Part) -> None:
    import torch

    part.figures["bf16 products, operations per second"] = machine.product_rate(section.device, torch.bfloat16)
    part.figures["fp32 products, operations per second"] = machine.product_rate(section.device, torch.float32, 4096)
    part.figures["copy, bytes per second"] = machine.copy_rate(section.device)


def gate(section: Section, bench: Any, folder: Path, part: Part) -> None:
    """At the tiny shape of ``make bench``, on the device."""
    if missing := missing_for_trl(section.trl_python):
        raise NotRun(missing)
    limit = bench.TOLERANCE if section.device == "cpu" else GATE_CUDA
    bench.execute(sys.executable, "model.py", str(folder))
    for workload, apart in bench.gate(str(section.trl_python), folder, float("inf")).items():
        part.figures[f"{workload}, gradients apart"] = apart
        # a distance is a finding here, with a bound of this section's
        part.at_most(f"{workload}: gradients of ours and TRL apart", apart, limit)


class Arms:
    """The runs of one script each, and their results so far."""

    def __init__(self, section: Section, bench: Any, folder: Path) -> None:
        self.section, self.bench, self.folder = section, bench, folder
        self.steps = ["--steps", "2", "--warmup", "1"] if section.small else ["--steps", "4", "--warmup", "2"]
        self.longest = 0.0
        self.no_trl = missing_for_trl(section.trl_python)

    def compare(self, workload: str, part: Part) -> None:
        """Two rounds of ours and TRL in turn, then the variants once, as far as the time allows."""
        if not (self.folder / "prompts.jsonl").exists():
            raise NotRun("there is no model to train")
        runs: dict[str, list[dict[str, Any]]] = {}
        rounds = [("ours", 1), ("trl", 1), ("ours", 2), ("trl", 2), *((name, 1) for name in list(VARIANTS)[1:])]
        share = self.section.left / (len(WORKLOADS) - WORKLOADS.index(workload))
        until = self.section.left - share
        for number, (arm, _) in enumerate(rounds if not self.section.small else rounds[:2]):
            if self.section.left - self.longest < (until if number > 1 else 5):
                part.figures["left out for want of time"] = [name for name, _ in rounds[number:]]
                break
            self._time(workload, arm, runs, part)
        part.figures["arms"] = runs
        part.figures["summary"] = self.summary(runs)
        part.holds(
            "ours was timed, and TRL where it is installed", "ours" in runs and ("trl" in runs or bool(self.no_trl))
        )

    def _time(self, workload: str, arm: str, runs: dict[str, list[dict[str, Any]]], part: Part) -> None:
        python, script, start = sys.executable, "ours_train.py", time.monotonic()
        if arm == "trl":
            if self.no_trl:
                part.figures["not run"] = {"trl": self.no_trl}
                return
            python, script = str(self.section.trl_python), "trl_train.py"
        else:
            _settings(self.section.small, OURS=VARIANTS[arm])
        result = self.folder / "result.json"
        options = [workload, "bf16", *self.steps, "--work", str(self.folder), "--result", str(result)]
        self.bench.execute(python, script, *options)
        runs.setdefault(arm, []).append(json.loads(result.read_text()))
        self.longest = max(self.longest, time.monotonic() - start)
        part.figures["arms"] = runs
        self.section.write()

    def summary(self, runs: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
        """Medians over all timed steps of an arm; the share of the device's rate is of forward and backward only."""
        report, found = self.bench.report, {}
        rate = self.section.parts.get("rates", {}).get("figures", {}).get("bf16 products, operations per second")
        for arm, results in runs.items():
            found[arm] = row = {
                "seconds": report.median([s for r in results for s in r["seconds"]]),
                "tokens": report.median([t for r in results for t in r["tokens"]]),
                "tokens per second": report.throughput(results),
                "peak host MiB": report.median([r["peak_mib"] for r in results]),
            }
            if "peak_device_mib" in results[0]:
                row["peak device MiB"] = report.median([r["peak_device_mib"] for r in results])
            if "phases" in results[0]:
                row["phases"] = report.phases(results, rate or float("nan"))
        if "ours" in found and "trl" in found:
            found["ours / trl"] = found["ours"]["tokens per second"] / found["trl"]["tokens per second"]
        return found


@cache
def missing_for_trl(python: Path) -> str:
    """Why TRL cannot be run; empty where it can."""
    names = ("trl", "accelerate", "datasets", "transformers", "torch")
    ask = f"import importlib.util as u; print(*(n for n in {names!r} if u.find_spec(n) is None))"
    try:
        done = subprocess.run([str(python), "-c", ask], capture_output=True, text=True, check=False, timeout=60)
    except OSError as error:
        return f"there is no Python for TRL: {error}"
    if done.returncode:
        return f"{python} does not run: {done.stderr.strip()[-300:]}"
    missing = done.stdout.split()
    return f"{', '.join(missing)} not installed for {python}" if missing else ""


def _settings(small: bool, **others: Any) -> None:
    """For the scripts that are started from now on."""
    shape, tokens = shapes.sizes(small)
    changes = {"SIZES": shape, "VOCABULARY": tokens, **(TINY if small else LARGE), **others}
    os.environ["BENCH_SETTINGS"] = json.dumps(changes)


def _bench() -> Any:
    """``benchmarks/run.py``, whose name is also that of the script beside this one."""
    spec = importlib.util.spec_from_file_location("bench_run", BENCHMARKS / "run.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _threads() -> int:
    return max(1, min(8, len(os.sched_getaffinity(0))))
