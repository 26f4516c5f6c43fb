"""The facts about a run on its page."""

from __future__ import annotations

import pytest
from rlhf_runtime.report.run_facts import LEFT_OUT, POINTS, curves, left_out, phase_times


def test_the_times_of_phases_are_means_over_all_steps_of_a_point() -> None:
    """Also of phases that few steps have: the shares of a step sum to 1."""
    lines = [{"step": 0, "time/evaluate": 9.0, "time/step": 9.0}]
    for step in range(1, 5 * POINTS):
        line = {"step": step, "time/generate": 1.0, "time/step": 1.0}
        lines.append(line | ({"time/evaluate": 20.0, "time/step": 21.0} if step % 10 == 9 else {}))
    times = phase_times(lines)
    assert len(curves(lines)["steps"]) == len(times["step"]) == POINTS
    assert (times["step"][:2], times["generate"][:2], times["evaluate"][:2]) == ([1.0, 5.0], [1.0, 1.0], [0.0, 4.0])
    parts = [times[phase] for phase in times if phase != "step"]
    assert [sum(point) for point in zip(*parts, strict=True)] == pytest.approx(times["step"])


def test_steps_without_times_have_no_phases() -> None:
    assert phase_times([]) == {name: [] for name in phase_times([])}
    lines = [{"step": 0, "time/step": 1.0}, {"step": 1, "time/step": float("nan")}, {"step": 2}]
    assert {tuple(values) for values in phase_times(lines).values()} == {(None, None, None)}


def test_what_the_members_of_an_algorithm_leave_out_is_counted() -> None:
    line = {"stream/filtered": 1.0, "math/pairs/tied_groups": 2.0, "eval/pairs/left_out": 5.0, "math/length/mean": 3.0}
    counts = left_out([{"step": 1, "data/dropped": 1.0, **line}, {"step": 2, "data/dropped": 4.0, **line}])
    assert {name: count for name, count, _ in counts} == {
        "data/dropped": 4.0,
        "stream/filtered": 2.0,
        "math/pairs/tied_groups": 4.0,
    }
    assert counts[-1][2] == LEFT_OUT["pairs/tied_groups"]
