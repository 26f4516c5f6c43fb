"""What a run says at its end: the time of a step, what took the other time, and how to go on."""

from __future__ import annotations

import json
import re
import shlex
from typing import Any

import pytest

from tests.runs import Finished, Workshop


def metrics(run: Finished) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]


def seconds_a_step(text: str) -> float:
    match = re.search(r"([0-9.e+-]+) s a step", text)
    assert match is not None, text
    return float(match[1])


def test_saves_and_exports_have_their_time_and_steps_are_timed_without_evaluations(shop: Workshop) -> None:
    held_out = shop.rows("held_out.jsonl", [{"prompt": "1+1=", "response": "2"}])
    changes = {"data": {"eval": str(held_out)}, "eval": {"every": 1}, "run": {"steps": 4}}
    run = shop.train("sft", "run", checkpoint={"every": 2, "export_every": 2, "save_best": False}, **changes)
    lines = metrics(run)
    assert [["time/save" in line, "time/export" in line] for line in lines] == [
        [False, False],
        [False, False],
        [True, True],  # those after step 2
        [False, False],
    ]
    times = sorted(line["time/step"] - line["time/evaluate"] for line in lines)
    expected = (times[1] + times[2]) / 2
    summary = shop.command("show", str(run.path))
    for text in (run.out, summary.out):
        assert seconds_a_step(text) == pytest.approx(expected, rel=5e-3)


def test_a_stopped_run_says_how_to_go_on(shop: Workshop) -> None:
    run = shop.train("sft", "run", run={"stop_after": 1}, checkpoint={"every": 1})
    last = run.out.splitlines()[-2]
    assert last.startswith(f"stopped: {run.path} (continue with: rlhf train ")
    words = shlex.split(last.partition("continue with: rlhf ")[2].removesuffix(")"))
    retry = shop.command(*words, output=run.path)
    assert retry.code == 0, retry.said
    assert retry.out.splitlines()[-2:] == [f"finished: {run.path}", f"report: {run.path / 'report.html'}"]
    assert [line["step"] for line in metrics(run)] == [1, 2, 3]
