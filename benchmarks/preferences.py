"""Steps of DPO, of a reward model and of SFT, ours against TRL's, in alternation: `python benchmarks/preferences.py`.

Before anything is timed, the losses of both sides in 20 optimizer steps must be equal (parity/run.py): only equal work
is compared. An arm that other processes disturb is run again.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import tempfile
import time
from datetime import date
from pathlib import Path
from typing import Any

from report import median, throughput
from run import HERE, circumstances, execute, parsed, parser_of
from settings import PREFERENCES, write

TARGETS = {"dpo": 2.0, "dpo-cached": 2.5, "dpo-prompts": 2.0, "reward": 1.6, "sft": 1.5}
"""The project's target in both precisions: throughput of ours divided by TRL's."""
DISTURBED = 0.03
"""Largest share of the processor's time that other processes may take while an arm runs."""
GATE = ("dpo-sigmoid", "reward", "sft")


def gate(trl: str, work: Path) -> list[dict[str, Any]]:
    """Check that the losses that are timed are equal on both sides; ends the benchmark if they differ."""
    result = work / "parity.json"
    execute(sys.executable, "parity/run.py", "--trl-python", trl, "--cases", *GATE, "--result", str(result))
    rows = json.loads(result.read_text())["table"]
    for row in rows:
        print(f"losses of ours and TRL, {row['case']}: at most {row['apart_most']:.1e} apart", flush=True)
    return rows


def others() -> float:
    """Seconds of processor time, of all cores, that other processes than this benchmark and its children took."""
    fields = [int(x) / os.sysconf("SC_CLK_TCK") for x in Path("/proc/stat").read_text().split("\n")[0].split()[1:9]]
    idle, waiting = fields[3:5]
    benchmark_seconds = sum(
        sum(resource.getrusage(process)[:2]) for process in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    )
    return sum(fields) - idle - waiting - benchmark_seconds


def undisturbed(python: str, script: str, options: list[str], result: Path, tries: int) -> dict[str, Any]:
    """Run one process of an arm. Repeat it if other processes took more than 3 % of the processor meanwhile."""
    for _ in range(tries):
        start, base = time.time(), others()
        execute(python, script, *options, "--result", str(result))
        share = (others() - base) / (time.time() - start) / (os.cpu_count() or 1)
        if share <= DISTURBED:
            return json.loads(result.read_text()) | {"others": share}
        print(f"repeating: other processes took {share:.0%} of the processor", flush=True)
    sys.exit(f"other processes disturb the machine: {tries} attempts at {script} {' '.join(options[:2])}")


def comparison(arms: dict[str, list[dict[str, Any]]], precisions: list[str]) -> list[dict[str, Any]]:
    """One row per workload and precision. Ends the benchmark if the two trained on different numbers of tokens."""
    rows = []
    for workload, target in TARGETS.items():
        for precision in precisions:
            runs = {side: arms.get(f"{workload}/{precision}/{side}", []) for side in ("ours", "trl")}
            if not all(runs.values()):
                continue
            tokens = {side: {t for run in side_runs for t in run["tokens"]} for side, side_runs in runs.items()}
            if tokens["ours"] != tokens["trl"]:
                sys.exit(
                    f"{workload}, {precision}: ours trained on {tokens['ours']} tokens a step, TRL on {tokens['trl']}"
                )
            row: dict[str, Any] = {"workload": workload, "precision": precision, "target": target}
            for side, side_runs in runs.items():
                row[f"{side}_seconds"] = median([s for run in side_runs for s in run["seconds"]])
                row[f"{side}_tokens_per_second"] = throughput(side_runs)
                row[f"{side}_peak_mib"] = median([run["peak_mib"] for run in side_runs])
            row["tokens"] = tokens["ours"].pop()
            row["computed_tokens"] = median([p["computed_tokens"] for run in runs["ours"] for p in run["phases"]])
            row["ratio"] = row["ours_tokens_per_second"] / row["trl_tokens_per_second"]
            rows.append(row)
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown; ``tokens`` of the rows of a step, ``computed`` by our update, which computes shared prompts once."""
    lines = [
        "| workload | | ours, s/step | TRL, s/step | ratio | target | tokens | computed | ours, MiB | TRL, MiB |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        missed = "" if r["ratio"] >= r["target"] else " (missed)"
        lines.append(
            f"| {r['workload']} | {r['precision']} | {r['ours_seconds']:.2f} | {r['trl_seconds']:.2f} "
            f"| **{r['ratio']:.2f}** | {r['target']}{missed} | {r['tokens']} | {r['computed_tokens']:.0f} "
            f"| {r['ours_peak_mib']:.0f} | {r['trl_peak_mib']:.0f} |"
        )
    return "\n".join(lines)


def phases(arms: dict[str, list[dict[str, Any]]]) -> str:
    names = ("log-probs", "forward and backward", "optimizer")
    lines = [f"| ours, ms per step | {' | '.join(names)} | rest |", "|---" * (len(names) + 2) + "|"]
    for arm, runs in arms.items():
        if arm.endswith("/ours"):
            steps = [step for run in runs for step in run["phases"]]
            medians = [median([step.get(name, 0.0) for step in steps]) for name in names]
            medians.append(median([s["step"] - sum(s.get(name, 0.0) for name in names) for s in steps]))
            lines.append(f"| {arm.removesuffix('/ours')} | {' | '.join(f'{1e3 * x:.0f}' for x in medians)} |")
    return "\n".join(lines)


def measure(arguments: argparse.Namespace, work: Path) -> dict[str, Any]:
    trl, start, load = str(arguments.trl_python), time.time(), os.getloadavg()[0]
    execute(sys.executable, "model.py", str(work))
    parity = gate(trl, work)
    limit = json.loads(execute(sys.executable, "ours_limit.py"))
    arms: dict[str, list[dict[str, Any]]] = {}
    options = ["--steps", str(arguments.steps), "--warmup", str(arguments.warmup), "--work", str(work)]
    for repeat in range(arguments.repeats):
        for workload in arguments.workloads:
            for precision in arguments.precisions:
                for side, python in (("ours", sys.executable), ("trl", trl)):
                    arm = [workload, precision, *options]
                    latest = undisturbed(python, f"{side}_train.py", arm, work / "result.json", arguments.tries)
                    arms.setdefault(f"{workload}/{precision}/{side}", []).append(latest)
                    print(
                        f"{time.time() - start:5.0f} s  {workload}/{precision}/{side}, repeat {repeat + 1}: "
                        f"{median(latest['seconds']):.2f} s/step, peak {latest['peak_mib']:.0f} MiB",
                        flush=True,
                    )
    return {
        **circumstances(arguments, load),
        "parity": parity,
        "limit": limit,
        "comparison": comparison(arms, arguments.precisions),
        "arms": arms,
        "seconds": time.time() - start,
    }


def main() -> None:
    name = f"{date.today().isoformat()}-preferences"
    parser = parser_of(__doc__.splitlines()[0], [*PREFERENCES, "sft"], name)
    parser.add_argument("--precisions", nargs="+", default=["fp32", "bf16"], choices=["fp32", "bf16"])
    parser.add_argument("--tries", type=int, default=5, help="of a process that others disturb")
    arguments = parsed(parser)
    with tempfile.TemporaryDirectory() as folder:
        result = measure(arguments, Path(folder))
    file = HERE / "results" / f"{arguments.name}.json"
    write(file, result)
    print(f"\n{table(result['comparison'])}\n\n{phases(result['arms'])}\n\n{file} after {result['seconds']:.0f} s")


if __name__ == "__main__":
    main()
