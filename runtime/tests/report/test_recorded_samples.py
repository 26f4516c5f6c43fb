"""Recorded samples as text and numbers."""

from __future__ import annotations

from pathlib import Path

import pytest
from rlhf.types import Group, RewardResult, Row, Trajectory, Turn
from rlhf_runtime.checkpoint.saved_groups import write_groups, write_lines
from rlhf_runtime.report.recorded_samples import extreme, read_samples

ROW = Row({}, "data", 0)


@pytest.mark.parametrize("write", [write_groups, write_lines])
def test_a_reward_of_process_rewards_has_their_sum_as_its_value(tmp_path: Path, write) -> None:
    """It applied, so it is shown and compared."""
    results = [{"prm": RewardResult(None, steps=((1, 0, 0.5), (1, 1, value)))} for value in (0.25, 1.0)]
    results.append({"prm": RewardResult(None)})
    turns = [Turn([1], False, text="?"), Turn([5, 6], True, [-0.5, -0.5], ((0, 0),), "stop", text="!")]
    trajectories = [Trajectory(ROW, turns, (0, n), rewards=r, reward=0.0) for n, r in enumerate(results)]
    path = tmp_path / f"samples.{'arrow' if write is write_groups else 'jsonl'}"
    write(path, [Group(ROW, 0, trajectories)], lambda t: "?")
    samples = read_samples(path, 1)
    assert [sample.rewards for sample in samples] == [{"prm": 0.75}, {"prm": 1.5}, {"prm": None}]
    assert [sample.sample for sample in extreme(samples, 3, "prm", best=True)] == [1, 0]
