"""Figures in the documentation's tables of benchmarks equal the results in the repository."""

from __future__ import annotations

import importlib
import json
import re
import sys
from pathlib import Path
from statistics import median
from typing import Any
from xml.etree import ElementTree

import pytest
from rlhf_runtime.output.metrics import read_metrics

from tests.pages import DOCS, ROOT, tables

BENCHMARKS = ROOT / "benchmarks"
RESULTS = {path.name: json.loads(path.read_text()) for path in sorted((BENCHMARKS / "results").glob("*.json"))}


@pytest.fixture
def script(monkeypatch):
    """A script of benchmarks/, imported like the other scripts of that folder import it."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    old_modules = set(sys.modules)
    yield importlib.import_module
    for name in set(sys.modules) - old_modules:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(BENCHMARKS)):
            del sys.modules[name]


def pages_of_figures() -> list[Path]:
    return [BENCHMARKS / "measurements.md", *sorted((BENCHMARKS / "notes").glob("*.md"))]


def plain(row: str) -> str:
    """The row with one space where a table has several."""
    return re.sub(r" +", " ", row).strip()


def sections(page: Path) -> list[tuple[list[str], set[str]]]:
    """Of every section of the page: the rows of its tables, and the results that it links."""
    links = {}
    for text in re.split(r"^(?=#)", page.read_text(encoding="utf-8"), flags=re.MULTILINE):
        links[text.partition("\n")[0].lstrip("# ")] = set(re.findall(r"results/([\w.-]+\.json)", text))
    rows: dict[str, list[str]] = {}
    for table in tables(page):
        assert len(set(table.header)) == len(table.header), f"{table.heading}: two columns with one name"
        lines = [plain(f"| {' | '.join(row.values())} |") for row in table.rows]
        rows.setdefault(table.heading, []).extend(lines)
    return [(lines, links[heading]) for heading, lines in rows.items()]


def beside_trl(result: dict[str, Any]) -> list[str]:
    """The rows of a result of ``run.py`` in the table of all processors."""
    name = "EPYC" if "EPYC" in result["machine"]["processor"] else "Xeon"
    rows = []
    for r in result["comparison"]:
        parts = "| |"
        if "trl_parts_peak_mib" in r:
            over = r["ours_tokens_per_second"] / r["trl_parts_tokens_per_second"]
            parts = f"| {over:.2f} | {r['trl_parts_peak_mib']:.0f}"
        rows.append(
            f"| {name} | {r['workload']} | {r['precision']} | {r['ours_seconds']:.2f} | {r['trl_seconds']:.2f} "
            f"| {r['ours_tokens_per_second']:.0f} | {r['trl_tokens_per_second']:.0f} | **{r['ratio']:.2f}** "
            f"| {r['target']}{'' if r['ratio'] >= r['target'] else ' (missed)'} | {r['ours_peak_mib']:.0f} "
            f"| {r['trl_peak_mib']:.0f} {parts} |"
        )
    return rows


def preference_rows(comparison: list[dict[str, Any]]) -> list[str]:
    """A row for each workload, with both precisions side by side."""
    rows = []
    for low, high in zip(comparison[1::2], comparison[::2], strict=True):
        assert (high["workload"], high["precision"], low["precision"]) == (low["workload"], "fp32", "bf16")
        steps = [
            f"{r['ours_seconds']:.2f} | {r['trl_seconds']:.2f} | **{r['ratio']:.2f}**"
            + ("" if r["ratio"] >= r["target"] else " (missed)")
            for r in (high, low)
        ]
        memory = [f"{r['ours_peak_mib']:.0f} | {r['trl_peak_mib']:.0f}" for r in (high, low)]
        sizes = f"{high['target']} | {high['tokens']} | {high['computed_tokens']:.0f}"
        rows.append(f"| {high['workload']} | {' | '.join([*steps, sizes, *memory])} |")
    return rows


def cluster(result: dict[str, Any]) -> str:
    """Median seconds, and tokens a second of all steps together."""
    arms = [result["arms"][f"fp32/{arm}"] for arm in ("ours", "trl")]
    seconds = [[s for run in runs for s in run["seconds"]] for runs in arms]
    tokens = [sum(sum(run["tokens"]) for run in runs) for runs in arms]
    rates = [count / sum(steps) for count, steps in zip(tokens, seconds, strict=True)]
    cells = [f"{median(steps):.2f}" for steps in seconds] + [f"{rate:.0f}" for rate in rates]
    return f"| grpo-natural | fp32 | {' | '.join(cells)} | **{result['ratio']['fp32']:.2f}** |"


def launchers(result: dict[str, Any]) -> list[str]:
    steps = (result.get(f"step_milliseconds_{launcher}") for launcher in ("on_ray", "in_processes", "in_one_process"))
    return [f"| {' | '.join(f'{ms:.1f}' for ms in steps if ms is not None)} |"]


def sharding(result: dict[str, Any]) -> list[str]:
    storages = ["fp32", "bf16"] if result["dtype"] == "bf16" else [""]
    rows = []
    for storage in storages:
        cells = []
        for clock in ("wall", "processor"):
            fsdp, deepspeed = (result[clock][f"{name} {storage}".strip()] for name in ("fsdp", "deepspeed"))
            cells += [f"{fsdp:.2f}", f"{deepspeed:.2f}", f"{fsdp / deepspeed:.2f}"]
        rows.append(f"| {result['dtype']} | {storage or result['dtype']} | {' | '.join(cells)} |")
    return rows


def weight_sync(result: dict[str, Any]) -> list[str]:
    rows = []
    for key in ("seconds", "processor_seconds"):
        cells = [f"{result[key][part]:.3f}" for part in ("copy", "repack", "sync", "sync with canary")]
        cells += [f"{result[key][f'{part} / (copy + repack)']:.2f}" for part in ("sync", "sync with canary")]
        rows.append(f"| {key.replace('_', ' ')} | {' | '.join(cells)} |")
    return rows


def long_contexts(ranks: dict[str, Any]) -> list[str]:
    return [
        f"| {n} | {r['kept'] / 1e6:.0f} | {r['peak'] / 1e6:.0f} | {r['processor']:.1f} | {r['wall']:.1f} |"
        for n, r in ranks.items()
    ]


def busy(result: dict[str, Any]) -> list[str]:
    full_steps = result["whole_steps"]
    rlhf, trl = (
        median(s for run in full_steps["processes"] if run["who"] == arm for s in run["seconds"])
        for arm in ("ours", "trl")
    )
    old_median, new_median = (median(full_steps["before_the_change"][key]["seconds"]) for key in ("before", "after"))
    return [f"| 16 | 5 to 10 | {rlhf:.1f} | | {trl:.1f} |", f"| 16 | 3 | {new_median:.1f} | {old_median:.1f} | |"]


def stream(result: dict[str, Any]) -> list[str]:
    streams = ["submission, staleness 1", "submission, staleness 4", "completion, staleness 4"]
    rows = []
    for name, runs in result.items():
        by_name = [runs["waves"], *(runs[f"continuous, {key}"] for key in streams)]
        rates = [f"{run['samples a second']:.1f}" for run in by_name]
        idle = [f"{run['engines idle']:.1%}" for run in by_name[1:3]]
        rows.append(f"| {name} | {' | '.join(rates)} | {' | '.join(idle)} |")
    return rows


def in_flight(runs: dict[str, Any]) -> list[str]:
    names = ("drain", "continue", "restart")
    rates = {age: [runs[f"{name}, staleness {age}"]["samples a second"] for name in names] for age in (1, 4)}
    return [f"| {age} | {' | '.join(f'{rate:.1f}' for rate in row)} |" for age, row in rates.items()]


def training_on_gpu(result: dict[str, Any]) -> list[str]:
    """Of ``gpu/run.py``."""
    rows = []
    for name, part in result["sections"].get("training", {}).items():
        f = part["figures"]
        if "MFU %" in f:
            rates = f"{f['tokens per second']:,.0f} | {f['MFU %']:.1f}"
            rows.append(f"| {name} | {rates} | {f['peak GiB']:.1f} | {f['reserved memory, of the plan']:.2f} |")
    return rows


def rows_of(result: dict[str, Any], report: Any, preferences: Any, driver: Any, overlap: Any) -> set[str]:
    """The rows that the scripts and this file make from a result."""
    rows: list[str] = []
    if "scaling" in result:
        rows = [*report.tables(result).splitlines(), *beside_trl(result)]
        if "competing_processes" in result:
            [r] = result["comparison"]
            rows.append(f"| 64 | none | {r['ours_seconds']:.1f} | | {r['trl_seconds']:.1f} |")
    elif "parity" in result:
        rows = [preferences.table(result["comparison"]), preferences.phases(result["arms"])]
        rows += preference_rows(result["comparison"])
    elif "overlap" in result:
        rows = [overlap.table(result["overlap"])]
    elif "per_token" in result:
        totals = {n: parts for n, parts in result["per_token"].items() if driver.TOTAL in parts}
        rows = [driver.table(totals)]  # the first measurement has other parts
    elif "fp32/ours" in result.get("arms", {}):
        rows = [cluster(result)]
    elif "milliseconds_on_ray" in result:
        rows = launchers(result)
    elif "wall" in result:
        rows = sharding(result)
    elif "bucket_mb" in result:
        rows = weight_sync(result)
    elif "whole_steps" in result:
        rows = busy(result)
    elif "trainer" in result:
        rows = long_contexts(result["ranks"])
    elif "runs" in result:
        rows = [row for run in result["runs"] for row in training_on_gpu(run)]
    elif "delays, learning 2 s" in result:
        rows = stream(result)
    elif "answers of 10 to 1,000 tokens, learning 2 s" in result:
        rows = in_flight(*result.values())
    return {plain(line) for text in rows for line in text.splitlines()}


def test_the_tables_of_a_section_are_made_of_the_results_that_it_links(script):
    scripts = [script(name) for name in ("report", "preferences", "driver", "overlap")]
    for page in pages_of_figures():
        for rows, links in sections(page):
            expected = set().union(*(rows_of(RESULTS[name], *scripts) for name in links))
            assert [row for row in rows if row not in expected] == [], (page.name, links)


def test_no_table_of_the_page_of_measurements_is_left_out():
    rows = [row for rows, _ in sections(BENCHMARKS / "measurements.md") for row in rows]
    assert len(rows) > 30


def test_the_learning_curve_is_drawn_from_a_run(shop, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "examples" / "quickstart"))
    drawing = importlib.import_module("curve")
    run = shop.train("rloo", "run", data={"eval": [{"path": str(shop.data)}]}, eval={"at_start": True})
    [start] = json.loads((run.path / "manifest.json").read_text())["starts"]
    picture = ElementTree.fromstring(drawing.draw(read_metrics(run.path / "metrics.jsonl"), start, "A run"))
    lines = [e.get("points").split() for e in picture if e.tag.endswith("polyline")]
    assert [len(points) for points in lines] == [3, 3, 2], "rewards, their running mean, evaluations"
    assert start["environment"]["packages"]["torch"] in "".join(picture.itertext())


def test_every_kept_result_is_linked_from_a_page():
    pages = [*DOCS.rglob("*.md"), *BENCHMARKS.rglob("*.md"), *ROOT.glob("plugins/*/*/README.md")]
    text = "".join(page.read_text(encoding="utf-8") for page in pages)
    assert [name for name in RESULTS if f"results/{name}" not in text] == []


def test_the_plan_is_measured_with_any_pairs(script, tmp_path) -> None:
    """Of a conversation the first question is the prompt; the pairs are written as they are."""
    question = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1?"}]
    answers = {name: [{"role": "assistant", "content": name}] for name in ("chosen", "rejected")}
    dialogue = "\n\nHuman: 1+1?\n\nAssistant: What?\n\nHuman: Add.\n\nAssistant: "
    pairs: list[dict[str, Any]] = [
        {"prompt": "1+1?", "chosen": "chosen", "rejected": "rejected"},
        {name: [*question, *answer] for name, answer in answers.items()},
        {name: f"{dialogue}{name}" for name in answers},
    ]
    for row in pairs:
        (tmp_path / "file.jsonl").write_text(json.dumps(row) + "\n")
        script("plan").write_rows(tmp_path / "file.jsonl", tmp_path, 8)
        tables = {n: json.loads((tmp_path / f"{n}.jsonl").read_text()) for n in ("pairs", "prompts", "rows")}
        rows = {"prompts": {"prompt": "1+1?"}, "rows": {"prompt": "1+1?", "response": "chosen"}}
        assert tables == {"pairs": row, **rows}
