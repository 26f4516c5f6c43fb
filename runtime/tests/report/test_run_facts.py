"""The facts about a run on its page."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from rlhf_runtime.report.run_facts import LEFT_OUT, POINTS, curves, left_out, phase_times, points_of, run_facts
from rlhf_runtime.report.run_record import RunRecord


def test_the_times_of_phases_are_means_over_all_steps_of_a_point() -> None:
    """Also of phases that few steps have: the shares of a step sum to 1."""
    lines = [{"step": 0, "time/evaluate": 9.0, "time/step": 9.0}]
    for step in range(1, 5 * POINTS):
        line = {"step": step, "time/generate": 1.0, "time/step": 1.0}
        lines.append(line | ({"time/evaluate": 20.0, "time/step": 21.0} if step % 10 == 9 else {}))
    points = points_of(lines, len(lines))
    times = phase_times(points)
    assert len(curves(points)["steps"]) == len(times["step"]) == POINTS
    assert (times["step"][:2], times["generate"][:2], times["evaluate"][:2]) == ([1.0, 5.0], [1.0, 1.0], [0.0, 4.0])
    parts = [times[phase] for phase in times if phase != "step"]
    assert [sum(point) for point in zip(*parts, strict=True)] == pytest.approx(times["step"])


def test_steps_without_times_have_no_phases() -> None:
    assert phase_times([]) == {name: [] for name in phase_times([])}
    lines = [{"step": 0, "time/step": 1.0}, {"step": 1, "time/step": float("nan")}, {"step": 2}]
    assert {tuple(values) for values in phase_times(points_of(lines, 3)).values()} == {(None, None, None)}


def test_what_the_members_of_an_algorithm_leave_out_is_counted() -> None:
    line = {"stream/filtered": 1.0, "math/pairs/tied_groups": 2.0, "eval/pairs/left_out": 5.0, "math/length/mean": 3.0}
    lines = [{"step": 1, "data/dropped": 1.0, **line}, {"step": 2, "data/dropped": 4.0, **line}]
    counts = left_out(points_of(lines, 2))
    assert counts == left_out(points_of(lines, POINTS + 1)), "two steps in one point"
    assert {name: count for name, count, _ in counts} == {
        "data/dropped": 4.0,
        "stream/filtered": 2.0,
        "math/pairs/tied_groups": 4.0,
    }
    assert counts[-1][2] == LEFT_OUT["pairs/tied_groups"]


def test_the_facts_of_a_long_run_need_no_memory_for_its_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the points of its curves are means of its steps."""
    monkeypatch.setattr("rlhf_runtime.report.run_facts.POINTS", 100)
    path, count = tmp_path / "metrics.jsonl", 600
    names = [f"a/metric/with/a/long/name/{number}" for number in range(40)]
    texts = [json.dumps({"step": n, **dict.fromkeys(names, n / 7), "eval/reward": -abs(n - 7)}) for n in range(count)]
    path.write_text("".join(f"{text}\n" for text in (*texts[1:9], "{", *texts[10:])) + texts[9])
    facts, memory = measured(lambda: run_facts(RunRecord.read(tmp_path)))
    _, of_all_lines = measured(lambda: [json.loads(text) for text in texts])
    assert memory < of_all_lines / 2
    steps = [step for step in range(1, count) if step != 9]
    parts = [steps[start : start + 6] for start in range(0, len(steps), 6)]
    picture = facts["curves"]
    assert (facts["steps"], picture["every"], facts["best"]) == (count - 1, 6, ["eval/reward", 0.0, 7])
    assert picture["steps"] == [part[-1] for part in parts]
    assert picture["metrics"]["eval/reward"] == pytest.approx(
        [fmean(-abs(n - 7) for n in part) for part in parts], 1e-5
    )
    assert picture["metrics"][names[3]] == pytest.approx([fmean(n / 7 for n in part) for part in parts], 1e-5)
    assert any("metrics.jsonl:9 " in problem for problem in facts["problems"])


def measured(function: Callable[[], Any]) -> tuple[Any, int]:
    """The result, and the largest number of bytes that were in use."""
    tracemalloc.start()
    try:
        return function(), tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
