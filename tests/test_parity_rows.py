"""Tokens, masks and labels of rows equal those recorded from TRL 1.16.0, or differ as documented
(``benchmarks/parity``).

TRL itself is not needed. `python benchmarks/parity/rows.py --record` records again, with TRL.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.forks import Forks, Place
from tests.members import ROOT

FOLDER = ROOT / "benchmarks/parity"
FILE = FOLDER / "trl-1.16.0-rows.json"
RECORDED = json.loads(FILE.read_text())

Verdicts = dict[str, dict[str, Any]]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def compared(forks: Forks, tmp_path_factory) -> Callable[..., tuple[int, Verdicts]]:
    """``(exit status, verdicts by case)`` of a comparison with a file of recorded rows."""
    place = Place("python", str(FOLDER), {**os.environ, "OMP_NUM_THREADS": "1"})

    def run(file: Path, *cases: str) -> tuple[int, Verdicts]:
        result = tmp_path_factory.mktemp("rows") / "verdicts.json"
        chosen = ["--cases", *cases] if cases else []
        arguments = ["--recorded", str(file), "--result", str(result), *chosen]
        process = forks.start([str(FOLDER / "rows.py"), *arguments], place=place)
        status = process.wait()
        assert result.exists(), process.output[-6000:]
        return status, {verdict["case"]: verdict for verdict in json.loads(result.read_text())}

    return run


@pytest.fixture(scope="module")
def verdicts(compared) -> Verdicts:
    return compared(FILE)[1]


def test_every_case_was_recorded(verdicts):
    assert list(verdicts) == list(RECORDED["cases"]), "record again: the cases have changed"
    assert RECORDED["versions"]["trl"] == "1.16.0"
    assert [len(rows) for rows in RECORDED["cases"].values()] == [v["rows"] for v in verdicts.values()]


def test_the_rows_equal_those_of_trl_or_differ_as_documented(verdicts):
    assert {case: verdict["wrong"] for case, verdict in verdicts.items() if verdict["wrong"]} == {}


def test_every_difference_has_its_number_in_the_documentation(verdicts):
    text = (ROOT / "docs/concepts/trl.md").read_text()
    section = text.partition("## Rows and tokens")[2].partition("\n## ")[0]
    numbers = {int(number) for number in re.findall(r"^(\d+)\. ", section, re.MULTILINE)}
    assert numbers == {v["differs"] for v in verdicts.values()} - {0}


def test_another_token_mask_label_or_row_is_detected(compared, tmp_path):
    document = json.loads(FILE.read_text())
    cases = document["cases"]
    cases["sft-plain"][1]["sequences"][0][0][-2] += 1
    cases["dpo-chat"][2]["sequences"][1][1] = cases["dpo-chat"][2]["sequences"][1][1].replace("01", "11")
    cases["kto-plain"][0]["label"] = False
    cases["kto-chat"][1]["sequences"][1] = cases["kto-chat"][2]["sequences"][1]
    cases["reward-margin"][1]["margin"] = 0.25
    cases["reward-plain"][0] = None
    cases["reward-long"][0] = cases["reward-plain"][1]
    cases["sft-chatml"][0]["sequences"][0][0][-1] += 1
    cases["sft-long"][0]["sequences"][0][0].pop()
    file = tmp_path / "changed.json"
    file.write_text(json.dumps(document))
    names = ["sft-plain", "dpo-chat", "kto-plain", "kto-chat", "reward-margin", "reward-plain", "reward-long"]
    names += ["sft-chatml", "sft-long", "sft-text", "dpo-chatml"]
    status, report = compared(file, *names)
    assert status == 1
    wrong = {name: verdict["wrong"].partition(":")[0] for name, verdict in report.items() if verdict["wrong"]}
    assert wrong == {
        "sft-plain": "row 1",
        "dpo-chat": "row 2",
        "kto-plain": "row 0",
        "kto-chat": "row 1",
        "reward-margin": "row 1",
        "reward-plain": "row 0",
        "reward-long": "row 0",
        "sft-chatml": "row 0",
        "sft-long": "row 0",
    }
