"""``benchmarks/real.py`` at tiny size: the files of the arms, our arms on them, the comparison of first steps, the
table."""

from __future__ import annotations

import copy
import gzip
import importlib
import json
import sys
from pathlib import Path

import pytest
from rlhf_testing.tiny import tiny_model

from tests.pages import ROOT

pytestmark = pytest.mark.slow


@pytest.fixture
def real(monkeypatch):
    """The script, whose settings the processes of its arms get."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.setenv("BENCH_THREADS", "1")
    old_modules = set(sys.modules)
    script = importlib.import_module("real")
    monkeypatch.setenv("BENCH_SETTINGS", json.dumps(script.SETTINGS | {"MAX_NEW_TOKENS": 4}))
    yield script
    for name in set(sys.modules) - old_modules:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(ROOT / "benchmarks")):
            del sys.modules[name]


@pytest.fixture
def work(real, tmp_path) -> Path:
    """The files of the arms. Pair 0 is too long, and pair 1 has two questions."""
    solutions = [{"question": f"{n} + 1?", "answer": f"It is {n + 1}."} for n in range(real.ROWS + 1)]
    (tmp_path / "gsm8k_train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in solutions))
    with gzip.open(tmp_path / "hh_harmless_pairs.jsonl.gz", "wt", encoding="utf-8") as file:
        for number in range(real.ROWS + 3):
            prompt = f"\n\nHuman: {number}?\n\nAssistant:" + (" a\n\nHuman: b\n\nAssistant:" if number == 1 else "")
            worse = " no" * (200 if number == 0 else 1)
            file.write(json.dumps({"chosen": f"{prompt} yes", "rejected": prompt + worse}) + "\n")
    folder = tmp_path / "work"
    folder.mkdir()
    real.Maker(tiny_model(tmp_path / "model", chat_template="default"), tmp_path, folder).make()
    return folder


def test_our_rows_are_those_of_all_workloads(real, work, monkeypatch):
    monkeypatch.setenv("PARITY_ROWS", "")  # restored afterwards
    monkeypatch.setattr(sys, "path", [*sys.path])
    rows = real.our_rows(work, list(real.TARGETS))
    assert {name: len(of_case) for name, of_case in rows.items()} == dict.fromkeys(real.TARGETS, real.ROWS)
    assert all(row["sequences"] for of_case in rows.values() for row in of_case)


@pytest.mark.full
def test_our_arms_run_on_the_rows_and_the_report_compares_them(real, work):
    workloads = ["grpo-natural", "dpo"]
    pairs = [json.loads(line) for line in (work / "pairs.jsonl").read_text().splitlines()]
    assert [f"{n}?" in pair["prompt"] for n, pair in enumerate(pairs, 2)] == [True] * real.ROWS
    arms = {}
    for workload in workloads:
        result = work / "result.json"
        options = ["--steps", "1", "--warmup", "1", "--work", str(work), "--result", str(result)]
        real.execute(sys.executable, "ours_train.py", workload, "fp32", *options)
        arms[f"{workload}/fp32/ours"] = [json.loads(result.read_text())]
        slower = json.loads(result.read_text())
        slower["seconds"] = [8 * seconds for seconds in slower["seconds"]]
        arms[f"{workload}/fp32/trl"] = [slower]
    result = real.tabled(arms, "fp32", {"fp32": 1e11})
    assert [(row["workload"], round(row["ratio"], 6)) for row in result["comparison"]] == [(w, 8.0) for w in workloads]
    assert "| dpo/fp32 | 0 |" in real.report.tables(result)

    rlhf, trl = (arms[f"dpo/fp32/{arm}"][0] for arm in ("ours", "trl"))
    assert rlhf["first"]["loss"] == pytest.approx(0.6931, abs=1e-3)
    real.check_first("dpo/fp32", rlhf, trl)
    other = copy.deepcopy(trl)
    other["first"]["grad_norm"] *= 1.01
    with pytest.raises(SystemExit, match=r"dpo.*grad_norm"):
        real.check_first("dpo/fp32", rlhf, other)
    other = copy.deepcopy(trl)
    other["tokens"] = [1]
    with pytest.raises(SystemExit, match="tokens"):
        real.check_first("dpo/fp32", rlhf, other)
