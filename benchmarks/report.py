"""Make tables from the results of the arms: ratios, time per phase of a step, cost against tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from settings import median

TARGETS = {
    ("grpo-forced", "fp32"): 1.15,
    ("grpo-forced", "bf16"): 1.8,
    ("grpo-natural", "fp32"): 2.0,
    ("grpo-natural", "bf16"): 2.5,
    ("sft", "fp32"): 1.5,
    ("sft", "bf16"): 1.5,
}
"""The project's target: throughput of ours divided by TRL's."""
PHASES = ("generate", "score and hand over", "log-probs", "forward and backward", "optimizer")

Runs = list[dict[str, Any]]


def throughput(runs: Runs) -> float:
    """Tokens per second: the median over all timed steps of all repeats."""
    return median([t / s for run in runs for t, s in zip(run["tokens"], run["seconds"], strict=True)])


def comparison(
    arms: dict[str, Runs], targets: Mapping[tuple[str, str], float | None] = TARGETS
) -> list[dict[str, Any]]:
    """One row per workload and precision; `arms` are named `<workload>/<precision>/<who>`."""
    rows = []
    for (workload, precision), target in targets.items():
        rlhf, trl = (arms.get(f"{workload}/{precision}/{side}", []) for side in ("ours", "trl"))
        if not rlhf or not trl:
            continue
        row: dict[str, Any] = {"workload": workload, "precision": precision, "target": target}
        for side, runs in (("ours", rlhf), ("trl", trl)):
            row[f"{side}_seconds"] = median([s for run in runs for s in run["seconds"]])
            row[f"{side}_tokens"] = median([t for run in runs for t in run["tokens"]])
            row[f"{side}_tokens_per_second"] = throughput(runs)
            row[f"{side}_peak_mib"] = median([run["peak_mib"] for run in runs])
        if parts := arms.get(f"{workload}/{precision}/trl in 4 parts"):
            row["trl_parts_tokens_per_second"] = throughput(parts)
            row["trl_parts_peak_mib"] = median([run["peak_mib"] for run in parts])
        row["ratio"] = row["ours_tokens_per_second"] / row["trl_tokens_per_second"]
        rows.append(row)
    return rows


def phases(runs: Runs, rate: float) -> dict[str, float]:
    """Median seconds per step of each phase, the rest, and the rate of the update as a share of the limit. The update
    counts the tokens that it computes (shared prompts once)."""
    steps = [step for run in runs for step in run["phases"]]
    figures = {name: median([step.get(name, 0.0) for step in steps]) for name in PHASES}
    figures["rest"] = median([s["step"] - sum(s.get(name, 0.0) for name in PHASES) for s in steps])
    shares = [6 * runs[0]["parameters"] * s["computed_tokens"] / s["forward and backward"] / rate for s in steps]
    figures["share of limit"] = median(shares)
    return figures


def scaling(arms: dict[str, Runs]) -> list[dict[str, Any]]:
    """`scale/<workload>/<factor>` arms: seconds per thousand trained tokens at each size."""
    rows = []
    for name, runs in arms.items():
        if name.startswith("scale/"):
            steps = [step for run in runs for step in run["phases"]]
            tokens, seconds = median([s["trained_tokens"] for s in steps]), median([s["step"] for s in steps])
            rows.append({"arm": name[6:], "tokens": tokens, "seconds": seconds, "ms_per_token": 1e3 * seconds / tokens})
    return rows


def tables(result: dict[str, Any]) -> str:
    """Markdown."""
    lines = [
        "| workload | | ours, s/step | TRL, s/step | ours, tokens/s | TRL, tokens/s | ratio | target | ours, MiB "
        "| TRL, MiB |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for r in result["comparison"]:
        met = "" if r["ratio"] >= r["target"] else " (missed)"
        lines.append(
            f"| {r['workload']} | {r['precision']} | {r['ours_seconds']:.2f} | {r['trl_seconds']:.2f} "
            f"| {r['ours_tokens_per_second']:.0f} | {r['trl_tokens_per_second']:.0f} | **{r['ratio']:.2f}** "
            f"| {r['target']}{met} | {r['ours_peak_mib']:.0f} | {r['trl_peak_mib']:.0f} |"
        )
    parts = [
        f"| {r['workload']} | {r['precision']} | {r['trl_parts_tokens_per_second']:.0f} "
        f"| {r['ours_tokens_per_second'] / r['trl_parts_tokens_per_second']:.2f} | {r['trl_parts_peak_mib']:.0f} |"
        for r in result["comparison"]
        if "trl_parts_peak_mib" in r
    ]
    if parts:
        lines += ["", "| TRL with its batch in 4 parts | | tokens/s | ours over it | MiB |", "|---|---|---|---|---|"]
        lines += parts
    names = (*PHASES, "rest")
    lines += ["", f"| ours, ms per step | {' | '.join(names)} | update's share of the limit |"]
    lines += ["|---" * (len(names) + 2) + "|"]
    for arm, figures in result["phases"].items():
        cells = " | ".join(f"{1e3 * figures[name]:.0f}" for name in names)
        lines.append(f"| {arm} | {cells} | {figures['share of limit']:.0%} |")
    if result["scaling"]:
        lines += ["", "| cost against tokens | trained tokens a step | s/step | ms/token |", "|---|---|---|---|"]
        lines += [
            f"| {r['arm']} | {r['tokens']:.0f} | {r['seconds']:.2f} | {r['ms_per_token']:.3f} |"
            for r in result["scaling"]
        ]
    return "\n".join(lines)
