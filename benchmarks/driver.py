"""Time and memory of the driver per token in a policy-gradient step: assemble, credit, dispatch, select, save, load.

No model computes anything. Groups of 8 samples, each of 700 prompt tokens and 2,000 sampled ones, go through the same
calls as in a run: ``assemble``, the advantages and weights of GRPO, the plan of 8 ranks, the micro-batches of all
ranks, writing the file of samples, and reading it. One thread.

    python benchmarks/driver.py [--tokens 1000000 10000000 100000000] [--output FILE.json]

``cpu`` is processor time and ``wall`` elapsed time, in microseconds per token, and ``mapped`` the bytes per token that
the system gave out page by page; each is the minimum over the repeats. ``result`` is the memory of the part's return
value, ``above`` the peak of memory beyond that, in bytes per token. 10^8 tokens need 10 GB.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import platform
import resource
import sys
import tempfile
import time
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import torch
from rlhf.ops.reduce import weigh
from rlhf.ops.trajectories import assemble
from rlhf.types import Group, Reduce, Row, Trajectory, Turn
from rlhf_algorithms import pipeline
from rlhf_algorithms.advantages import GroupNorm
from rlhf_runtime.checkpoint import saved_groups
from rlhf_runtime.models.dispatch import micro_batches, plan, unit_prefixes

PROMPT, ANSWER, SAMPLES = 700, 2000, 8
RANKS, BUDGET, REPEATS = 8, 65536, 3
TOTAL = "a step"
"""All parts but load, which a resume does once."""


def groups(tokens: int) -> list[Group]:
    """Samples with ``tokens`` tokens in all."""
    rng, result = np.random.default_rng(0), []

    def draw(count: int) -> Any:
        return array("i", rng.integers(150000, size=count, dtype=np.int32).tobytes())

    for number in range(max(1, round(tokens / (PROMPT + ANSWER) / SAMPLES))):
        row = Row({"prompt": "p"}, "train", number)
        prompt = Turn(draw(PROMPT), sampled=False, text="word " * PROMPT)
        samples = []
        for sample in range(SAMPLES):
            logprobs = array("f", (-2 * rng.random(ANSWER, dtype=np.float32)).tobytes())
            spans, text = ((0, 3), (ANSWER // 2, 4)), "word " * ANSWER
            answer = Turn(draw(ANSWER), True, logprobs, spans, "stop", text=text)
            reward = float(rng.random())
            samples.append(Trajectory(row, [prompt, answer], (number, sample), reward=reward, score=reward))
        result.append(Group(row, number, samples))
    return result


def parts(data: list[Group], path: Path) -> Iterator[tuple[str, Callable[[], Any]]]:
    """(name, what to measure) in the order of a step."""
    rows = {(g.row.source, g.row.index): g.row for g in data}
    yield "assemble", lambda: assemble(data)
    batch = assemble(data)
    assert batch is not None
    yield "credit", lambda: _credit(batch)
    credited = _credit(batch)
    names = ["advantages", "gen_logprobs", "loss_mask", "temperature", "weight/policy"]
    slim = credited.select_columns(names)
    yield "dispatch", lambda: _plan(slim)
    shares = _plan(slim)
    yield "select", lambda: micro_batches(slim, shares)
    yield "save", lambda: saved_groups.write_groups(path, data)
    yield "load", lambda: saved_groups.read_groups(path, lambda source, index: rows[source, index])


def _credit(batch: Any) -> Any:
    """As GRPO does it, and the weights of its loss."""
    return weigh(pipeline.credit(batch, GroupNorm(None))[0], {"policy": Reduce("token_mean")})


def _plan(batch: Any) -> Any:
    units = unit_prefixes(batch)
    return plan(units.tokens, RANKS, BUDGET, units.order, units.shared)


def measure(tokens: int, folder: Path) -> dict[str, dict[str, float]]:
    """{part: its figures} for ``tokens`` tokens a step."""
    data, figures = groups(tokens), {}
    count = sum(len(turn.ids) for g in data for t in g.trajectories for turn in t.turns)
    for name, part in parts(data, folder / "step-000001"):
        times = [_timed(part) for _ in range(REPEATS)]
        peak, result = _memory(part)
        cpu, wall, mapped = (min(values) / count for values in zip(*times, strict=True))
        figures[name] = {"cpu": cpu * 1e6, "wall": wall * 1e6, "mapped": mapped}
        figures[name] |= {"result": result / count, "above": (peak - result) / count}
    steps = [part for name, part in figures.items() if name != "load"]
    figures[TOTAL] = {key: sum(part[key] for part in steps) for key in ("cpu", "wall", "mapped")}
    figures[TOTAL]["above"] = max(part["above"] for part in steps)
    figures["file"] = {"result": (folder / "step-000001").stat().st_size / count}
    return figures


def table(per_token: dict[str, Any]) -> str:
    """The rows of measurements.md: processor time by part and in all, and the largest memory above a part's result."""
    return "\n".join(
        f"| 10^{len(tokens) - 1} | "
        + " | ".join(f"{part['cpu']:.3f}" for name, part in parts.items() if name not in ("load", "file"))
        + f" | {parts[TOTAL]['above']:.1f} |"
        for tokens, parts in per_token.items()
    )


def _timed(part: Callable[[], Any]) -> tuple[float, ...]:
    """Seconds of the processor, seconds, and bytes of the mapped pages (a huge page counts as a small one)."""
    gc.collect()
    start = _clocks()
    result = part()
    spent = tuple(b - a for a, b in zip(start, _clocks(), strict=True))
    del result
    return spent


def _clocks() -> tuple[float, ...]:
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    return time.process_time(), time.perf_counter(), faults * resource.getpagesize()


def _memory(part: Callable[[], Any]) -> tuple[int, int]:
    """Bytes that the process needs more at the peak of ``part``, and that its result takes."""
    _release()
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again at what is in use now
    start = _status("VmRSS")
    result = part()
    peak = _status("VmHWM")
    _release()
    after = _status("VmRSS")
    del result
    return peak - start, after - start


def _release() -> None:
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    if "pyarrow" in sys.modules:
        sys.modules["pyarrow"].default_memory_pool().release_unused()


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[10**6, 10**7])
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    load, results = os.getloadavg()[0], {}
    with tempfile.TemporaryDirectory() as folder:
        for tokens in args.tokens:
            results[str(tokens)] = measured = measure(tokens, Path(folder))
            print(f"{tokens:,} tokens a step")
            for name, figures in measured.items():
                print(f"  {name:9}  " + "  ".join(f"{key} {value:9.4f}" for key, value in figures.items()))
    if args.output is not None:
        machine = {"processor": _processor(), "cpus": os.cpu_count(), "load_before": load}
        versions = {"python": platform.python_version(), "torch": torch.__version__, "pyarrow": pyarrow.__version__}
        shape = {"prompt": PROMPT, "answer": ANSWER, "samples": SAMPLES, "ranks": RANKS, "budget": BUDGET}
        text = {"shape": shape, "repeats": REPEATS, "per_token": results, "machine": machine, "versions": versions}
        args.output.write_text(json.dumps(text, indent=1) + "\n")


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())


if __name__ == "__main__":
    main()
