"""Figures in the documentation's tables of benchmarks equal the results in the repository."""

from __future__ import annotations

import importlib
import json
import re
import sys
from pathlib import Path
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
    before = set(sys.modules)
    yield importlib.import_module
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(BENCHMARKS)):
            del sys.modules[name]


def written(page: Path) -> list[str]:
    """The rows of all tables of the page."""
    return [f"| {' | '.join(row.values())} |" for table in tables(page) for row in table.rows]


def made(report: Any, preferences: Any, driver: Any, overlap: Any) -> set[str]:
    """The rows that the scripts make from each result."""
    shown = []
    for result in RESULTS.values():
        if "scaling" in result:
            shown.append(report.tables(result))
        elif "parity" in result:
            shown += [preferences.table(result["comparison"]), preferences.phases(result["arms"])]
        elif "overlap" in result:
            shown.append(overlap.table(result["overlap"]))
        elif "per_token" in result:
            whole = {n: parts for n, parts in result["per_token"].items() if driver.TOTAL in parts}
            shown.append(driver.table(whole))  # the first measurement has other parts
    return {re.sub(r" +", " ", line) for text in shown for line in text.splitlines()}


def test_the_tables_of_benchmarks_are_made_of_the_results(script):
    rows = written(BENCHMARKS / "measurements.md")
    assert len(rows) > 50
    known = made(*map(script, ("report", "preferences", "driver", "overlap")))
    assert [row for row in rows if re.sub(r" +", " ", row) not in known] == []


def test_the_learning_curve_is_drawn_from_a_run(shop, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "examples" / "quickstart"))
    drawing = importlib.import_module("curve")
    run = shop.train("rloo", "run", data={"eval": [{"path": str(shop.data)}]}, eval={"at_start": True})
    [start] = json.loads((run.path / "manifest.json").read_text())["starts"]
    picture = ElementTree.fromstring(drawing.draw(read_metrics(run.path / "metrics.jsonl"), start, "A run"))
    lines = [e.get("points").split() for e in picture if e.tag.endswith("polyline")]
    assert [len(points) for points in lines] == [3, 3, 2], "rewards, their running mean, evaluations"
    assert start["environment"]["packages"]["torch"] in "".join(picture.itertext())


@pytest.mark.parametrize("name", RESULTS)
def test_every_kept_result_is_linked_from_a_page(name):
    pages = [*DOCS.rglob("*.md"), *BENCHMARKS.glob("*.md"), *ROOT.glob("plugins/*/*/README.md")]
    assert any(f"results/{name}" in page.read_text(encoding="utf-8") for page in pages)
