"""Runs whose policy and engine are two processes on one device, started by the launcher ``processes``: the memory of a
GPU is mapped by the other process, every sync is proven, and the engine sleeps while the policy learns. No Ray."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import shapes
from parts import Part, Section
from rlhf_runtime.output.metrics import read_metrics
from rlhf_runtime.setup.build import train
from sync import one_device

STEPS = 3
PREFIXES = ("time/", "sync/", "loss", "policy/")
"""Beginnings of the names of metrics that are copied into the figures."""


@dataclass(frozen=True)
class Case:
    name: str
    transport: str
    generator: dict[str, Any] = field(default_factory=dict)
    seconds: float = 100.0
    """The time that it needs at least."""


SHARE: dict[str, Any] = {"kv_cache_gib": None, "memory_share": 0.3}
CASES = (
    Case("shared, asleep at level 2", "shared", {**SHARE, "sleep_level": 2}),
    Case("shared, compiled", "shared", {**SHARE, "eager": False}, seconds=200.0),
    Case("shared, asleep at level 1", "shared", SHARE),
    Case("shared, kv_cache_gib", "shared"),
    Case("store", "store", SHARE),
)
"""In the order of their worth. A compiled engine replays graphs that were captured before the sync."""


def run(section: Section) -> None:
    model = shapes.make(section.shared, section.small)
    for case in CASES:
        run_it = partial(steps, section, model, case)
        section.part(case.name, run_it, needs=("vllm",), seconds=case.seconds)


def steps(section: Section, model: Path, case: Case, part: Part) -> None:
    options = case.generator
    if section.device == "cpu":
        if case.transport != "store":
            section.needs_cuda()
        options = {}
    config = one_device(section, model, case.transport, STEPS, launcher="processes", **options)
    done = train(config)
    lines = read_metrics(done.directory.path / "metrics.jsonl")
    part.figures["steps"] = [{name: x for name, x in line.items() if name.startswith(PREFIXES)} for line in lines]
    part.holds(f"{STEPS} steps were made and learnt from", len(lines) == STEPS and done.state.updates == STEPS)
    syncs = [line for line in lines if "sync/attempts" in line]
    part.holds("steps have syncs", bool(syncs))
    proven = sum(line["sync/attempts"] == 1 for line in syncs) / max(1, len(syncs))
    part.figures["syncs at the first try, share"] = proven
    part.at_least("syncs at the first try, share", proven, 1.0)
    seconds = statistics.median(line["time/sync"] for line in syncs)
    part.figures["sync"] = {"seconds": seconds, "bytes per second": syncs[-1]["sync/MiB"] * 2**20 / seconds}
