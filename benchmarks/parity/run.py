"""Losses of ours and of TRL at every optimizer step on the same model, rows, order and hyperparameters.

    python benchmarks/parity/run.py [--trl-python PATH] [--cases NAME ...] [--result FILE] [--record]

Prints the table of docs/concepts/trl.md. Exits with 1 if the losses of a case differ relatively by more than 1e-4.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from cases import CASES, ROWS, STEPS, write

HERE = Path(__file__).resolve().parent
PEERS = HERE.parents[1] / ".venv-peers"
RECORDED = HERE / "trl-1.16.0.json"
TOLERANCE = 1e-4


def execute(python: str, script: str, *arguments: str) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    command = [python, str(HERE / script), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{script} {' '.join(arguments)} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")


def apart(losses: list[float], trl: list[float]) -> list[float]:
    """|ours - TRL| / |TRL| at each step."""
    return [abs(a - b) / abs(b) for a, b in zip(losses, trl, strict=True)]


def compare(rlhf: dict[str, Any], trl: dict[str, Any]) -> list[dict[str, Any]]:
    """One row per case. Raises ValueError if the two sides trained on different tokens."""
    rows = []
    for name, result in rlhf.items():
        if result["tokens"] != trl[name]["tokens"]:
            raise ValueError(f"{name}: ours and TRL trained on different tokens, so their losses cannot be compared")
        distances = apart(result["losses"], trl[name]["losses"])
        rows.append(
            {
                "case": name,
                "first_loss": trl[name]["losses"][0],
                "last_loss": trl[name]["losses"][-1],
                "apart_first": distances[0],
                "apart_most": max(distances),
                "equal": max(distances) <= TOLERANCE,
            }
        )
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    lines = ["| case | loss at step 1 | at step 20 | apart, most of 20 steps | |", "|---|---|---|---|---|"]
    lines += [
        f"| `{r['case']}` | {r['first_loss']:.4f} | {r['last_loss']:.4f} | {r['apart_most']:.1e} "
        f"| {'' if r['equal'] else 'differs'} |"
        for r in rows
    ]
    return "\n".join(lines)


def record(models: dict[str, str], trl: dict[str, Any]) -> None:
    """Write :data:`RECORDED`. Cases that were not run keep their records if models and versions are the same."""
    command, cases = "python benchmarks/parity/run.py --record", dict(trl["cases"])
    if RECORDED.exists():
        old = json.loads(RECORDED.read_text())
        if old["models"] == models and old["versions"] == trl["versions"]:
            cases = old["cases"] | cases
    ordered = {case.name: cases[case.name] for case in CASES if case.name in cases}
    write(RECORDED, {"command": command, "models": models, "versions": trl["versions"], "cases": ordered})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trl-python", type=Path, default=PEERS / "bin/python", help="Python that has TRL 1.16.0")
    parser.add_argument("--cases", nargs="+", choices=[case.name for case in CASES], help="all where absent")
    parser.add_argument("--result", type=Path, help="JSON file to write: both sides' losses and the table")
    parser.add_argument(
        "--record", action="store_true", help=f"write TRL's losses to {RECORDED.name}, which tests read"
    )
    arguments = parser.parse_args()
    if not arguments.trl_python.exists():
        sys.exit(f"{arguments.trl_python} does not exist: name a Python that has TRL 1.16.0 with --trl-python")
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        execute(sys.executable, "tiny.py", folder)
        chosen = ["--cases", *arguments.cases] if arguments.cases else []
        results: dict[str, dict[str, Any]] = {}
        for side, python in (("trl", str(arguments.trl_python)), ("ours", sys.executable)):
            file = work / f"{side}.json"
            execute(python, f"{side}_losses.py", "--work", folder, "--result", str(file), *chosen)
            results[side] = json.loads(file.read_text())
        models = json.loads((work / "models.json").read_text())
    rows = compare(results["ours"]["cases"], results["trl"]["cases"])
    if arguments.record:
        record(models, results["trl"])
    if arguments.result:
        write(arguments.result, {"steps": STEPS, "rows": ROWS, "models": models, "table": rows, **results})
    print(table(rows))
    if not all(row["equal"] for row in rows):
        sys.exit(1)


if __name__ == "__main__":
    main()
