"""The losses of 20 optimizer steps equal recorded losses of TRL 1.16.0, step by step (``benchmarks/parity``).

TRL itself is not needed. `python benchmarks/parity/run.py --record` records again, with TRL.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable

import pytest

from tests.forks import Forks, Place
from tests.members import ROOT

FOLDER = ROOT / "benchmarks/parity"
RECORDED = json.loads((FOLDER / "trl-1.16.0.json").read_text())
TOLERANCE = 1e-4
"""Relative tolerance of the loss, in fp32."""

pytestmark = [pytest.mark.slow, pytest.mark.full]


@pytest.fixture(scope="module")
def execute(forks: Forks) -> Callable[..., None]:
    def run(script: str, *arguments: str) -> None:
        place = Place("python", str(FOLDER), {**os.environ, "OMP_NUM_THREADS": "1"})
        process = forks.start([str(FOLDER / script), *arguments], place=place)
        assert process.wait() == 0, process.output[-6000:]

    return run


@pytest.fixture(scope="module")
def work(tmp_path_factory, execute):
    folder = tmp_path_factory.mktemp("parity")
    execute("tiny.py", str(folder))
    return folder


@pytest.fixture(scope="module")
def ours(work, execute):
    models = json.loads((work / "models.json").read_text())
    assert models == RECORDED["models"], (
        "the models are not those that TRL was recorded with, so losses cannot be compared: undo the change of "
        "benchmarks/parity/tiny.py or rlhf_testing.tiny, or record again"
    )
    file = work / "ours.json"
    execute("ours_losses.py", "--work", str(work), "--result", str(file))
    return json.loads(file.read_text())["cases"]


def test_every_case_was_recorded(ours):
    assert list(ours) == list(RECORDED["cases"]), "record again: the cases have changed"
    assert RECORDED["versions"]["trl"] == "1.16.0"


@pytest.mark.parametrize("case", RECORDED["cases"])
def test_the_losses_are_those_of_trl(ours, case):
    result, trl = ours[case], RECORDED["cases"][case]
    assert result["tokens"] == trl["tokens"], "not the same tokens were trained on"
    assert len(result["losses"]) == len(trl["losses"]) == 20
    differences = [abs(a - b) / abs(b) for a, b in zip(result["losses"], trl["losses"], strict=True)]
    assert max(differences) <= TOLERANCE, (
        f"step {differences.index(max(differences)) + 1} is {max(differences):.1e} apart"
    )
    assert max(trl["losses"]) > 1.02 * min(trl["losses"])  # the loss changes
