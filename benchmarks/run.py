"""Benchmarks of ours and TRL: first check that both compute the same gradients, then time both.

Each arm is a separate process. Arms alternate, repeat by repeat, so that a machine that slows down slows both. Prints
the tables and writes them with every step's time to results/<name>.json.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from typing import Any

import report
from settings import THREADS, WORKLOADS, write

HERE = Path(__file__).resolve().parent
TOLERANCE = 1e-5
PEERS = HERE.parent / ".venv-peers"


@contextmanager
def competing(count: int) -> Iterator[None]:
    """``count`` other processes that never wait, beside what is timed."""
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for other in processes:
            other.kill()
            other.wait()


def execute(python: str, script: str, *arguments: str) -> str:
    """Standard output of a script of this folder; ends the benchmark with the script's own output if it fails."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(THREADS), "TOKENIZERS_PARALLELISM": "false"}
    environment |= {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    done = subprocess.run(
        [python, str(HERE / script), *arguments], env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(f"{script} {' '.join(arguments)} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return done.stdout


def distance(work: Path, workload: str) -> float:
    """|ours - TRL| / |TRL| of the gradients of all parameters together, as both left them."""
    from safetensors.torch import load_file

    gradients, reference = (load_file(str(work / f"{side}-{workload}.safetensors")) for side in ("ours", "trl"))
    if set(gradients) != set(reference):
        sys.exit(f"{workload}: the parameters with gradients differ: {sorted(set(gradients) ^ set(reference))}")
    difference = sum(float((gradients[n] - reference[n]).double().square().sum()) for n in gradients) ** 0.5
    return difference / sum(float(reference[n].double().square().sum()) for n in reference) ** 0.5


def gate(trl: str, work: Path, tolerance: float = TOLERANCE) -> dict[str, float]:
    """Relative L2 distance of the gradients of both on the same batches. Ends the benchmark above the tolerance."""
    execute(sys.executable, "ours_gradients.py", "--work", str(work))
    execute(trl, "trl_gradients.py", "--work", str(work))
    distances = {}
    for workload in ("grpo", "sft"):
        distances[workload] = distance(work, workload)
        print(f"gradients of ours and TRL, {workload}: relative distance {distances[workload]:.1e}", flush=True)
        if not distances[workload] <= tolerance:
            sys.exit(
                f"{workload}: gradients differ by more than {tolerance:g}: nothing is timed, as they are not equal work"
            )
    return distances


def plan(arguments: argparse.Namespace) -> list[tuple[str, str, list[str]]]:
    """(arm, script, arguments) in the order of one repeat."""
    steps = ["--steps", str(arguments.steps), "--warmup", str(arguments.warmup)]
    return [
        (f"{workload}/{precision}/{side}", f"{side}_train.py", [workload, precision, *steps])
        for workload in arguments.workloads
        for precision in arguments.precisions
        for side in ("ours", "trl")
    ]


def parts_plan(arguments: argparse.Namespace) -> list[tuple[str, str, list[str]]]:
    """TRL once more with its GRPO batch split into four: not its default, but faster with a processor's caches."""
    steps = ["--steps", str(arguments.steps), "--warmup", str(arguments.warmup), "--parts", "4"]
    return [
        (f"{workload}/{precision}/trl in 4 parts", "trl_train.py", [workload, precision, *steps])
        for workload in arguments.workloads
        if workload.startswith("grpo")
        for precision in arguments.precisions
    ]


def scale_plan(arguments: argparse.Namespace) -> list[tuple[str, str, list[str]]]:
    steps = ["--steps", str(min(3, arguments.steps)), "--warmup", "1"]
    return [
        (f"scale/{workload}/x{scale}", "ours_train.py", [workload, "fp32", "--scale", str(scale), *steps])
        for workload in ("grpo-forced", "sft")
        if workload in arguments.workloads
        for scale in (1, 2, 4)
    ]


def processor() -> str:
    names = [
        x.split(":")[1].strip() for x in Path("/proc/cpuinfo").read_text().splitlines() if x.startswith("model name")
    ]
    return f"{names[0] if names else platform.machine()}, {os.cpu_count()} cores"


def versions(python: str, names: tuple[str, ...]) -> dict[str, str]:
    code = f"import importlib.metadata as m, json; print(json.dumps({{n: m.version(n) for n in {names!r}}}))"
    return json.loads(subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout)


def circumstances(arguments: argparse.Namespace, load_before: float) -> dict[str, Any]:
    """Time, machine, versions and settings: the head of every file of results."""
    return {
        "date": date.today().isoformat(),
        "machine": {
            "processor": processor(),
            "system": platform.platform(),
            "threads": THREADS,
            "load_before": load_before,
        },
        "versions": {
            "ours": versions(sys.executable, ("rlhf-core", "torch", "transformers")),
            "trl": versions(str(arguments.trl_python), ("trl", "torch", "transformers", "accelerate")),
        },
        "settings": {"steps": arguments.steps, "warmup": arguments.warmup, "repeats": arguments.repeats},
    }


def measure(arguments: argparse.Namespace, work: Path) -> dict[str, Any]:
    trl = str(arguments.trl_python)
    start, load_before = time.time(), os.getloadavg()[0]
    execute(sys.executable, "model.py", str(work))
    distances = gate(trl, work)
    limit = json.loads(execute(sys.executable, "ours_limit.py"))
    print(f"matrix products: {limit['fp32'] / 1e9:.0f} GFLOP/s fp32, {limit['bf16'] / 1e9:.0f} bf16", flush=True)
    arms: dict[str, report.Runs] = {}
    timed = [(r + 1, *job) for r in range(arguments.repeats) for job in plan(arguments)]
    single_jobs = [] if arguments.busy else [(1, *job) for job in (*parts_plan(arguments), *scale_plan(arguments))]
    for repeat, arm, script, options in [*timed, *single_jobs]:
        python = trl if script == "trl_train.py" else sys.executable
        result = work / "result.json"
        with competing(arguments.busy):
            execute(python, script, *options, "--work", str(work), "--result", str(result))
        arms.setdefault(arm, []).append(json.loads(result.read_text()))
        latest = arms[arm][-1]
        print(
            f"{time.time() - start:5.0f} s  {arm}, repeat {repeat}: {report.median(latest['seconds']):.2f} s/step, "
            f"{report.throughput([latest]):.0f} tokens/s, peak {latest['peak_mib']:.0f} MiB",
            flush=True,
        )
    rlhf_arms = {name: runs for name, runs in arms.items() if name.endswith("/ours")}
    return {
        **circumstances(arguments, load_before),
        "competing_processes": arguments.busy,
        "gradient_distance": distances,
        "limit": limit,
        "comparison": report.comparison(arms),
        "phases": {
            name.removesuffix("/ours"): report.phases(runs, limit[name.split("/")[1]])
            for name, runs in rlhf_arms.items()
        },
        "scaling": report.scaling(arms),
        "arms": arms,
        "seconds": time.time() - start,
    }


def parser_of(description: str, workloads: Sequence[str], name: str) -> argparse.ArgumentParser:
    """The arguments that every comparison with TRL has."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--trl-python", type=Path, default=PEERS / "bin/python", help="Python that has TRL")
    parser.add_argument("--repeats", type=int, default=2, help="processes per arm")
    parser.add_argument("--steps", type=int, default=5, help="timed steps per process")
    parser.add_argument("--warmup", type=int, default=2, help="steps before them")
    parser.add_argument("--workloads", nargs="+", choices=workloads, default=list(workloads))
    parser.add_argument("--name", default=name, help="results/<name>.json")
    return parser


def parsed(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Parse the arguments; end the benchmark if the Python with TRL does not exist."""
    arguments = parser.parse_args()
    if not arguments.trl_python.exists():
        sys.exit(
            f"{arguments.trl_python} does not exist: `make bench` makes it, or name a Python that has the packages of "
            "requirements-peers.txt with --trl-python"
        )
    return arguments


def main() -> None:
    parser = parser_of(__doc__.splitlines()[0], WORKLOADS, date.today().isoformat())
    parser.add_argument("--quick", action="store_true", help="one repeat of two steps: tests the script only")
    parser.add_argument("--busy", type=int, default=0, metavar="N", help="N other processes that compute all the time")
    parser.add_argument("--precisions", nargs="+", choices=("fp32", "bf16"), default=["fp32", "bf16"])
    arguments = parsed(parser)
    if arguments.quick:
        arguments.repeats, arguments.steps, arguments.warmup = 1, 2, 1
    with tempfile.TemporaryDirectory() as folder:
        result = measure(arguments, Path(folder))
    results = HERE / "results"
    results.mkdir(exist_ok=True)
    write(results / f"{arguments.name}.json", result)
    print(f"\n{report.tables(result)}\n\n{results / f'{arguments.name}.json'} after {result['seconds']:.0f} s")


if __name__ == "__main__":
    main()
