"""Metrics of each reward source."""

from __future__ import annotations

import pytest
from rlhf.types import Group, RewardResult, Row, Trajectory, Turn
from rlhf_runtime.observe.sample_metrics import failure_metrics, info_metrics, source_metrics

ROW = Row({}, "data", 0)


def sample(turn_rewards=(), **rewards):
    turns = [Turn([1], False), *(Turn([2], True, reward=r) for r in turn_rewards)]
    return Trajectory(ROW, turns, (0, 0), rewards=rewards)


def test_each_source_is_averaged_over_the_samples_that_it_scored():
    groups = [
        Group(ROW, 0, [sample(math=RewardResult(1.0), style=RewardResult(-2.0)), sample(math=RewardResult(0.0))]),
        Group(ROW, 1, [sample(math=RewardResult(0.5), style=RewardResult(None)), sample()]),
    ]
    assert source_metrics(groups) == {
        "reward/math/mean": 0.5,
        "reward/math/std": pytest.approx((0.5 / 3) ** 0.5),
        "reward/style/mean": -2.0,
        "reward/style/std": 0.0,
    }
    assert source_metrics([]) == {}


def test_numbers_of_info_and_rewards_of_an_environment():
    info = {"found": True, "length": 4, "note": "text", "nan": float("nan"), "list": [1]}
    groups = [
        Group(ROW, 0, [sample((1.0, None, 2.0), m=RewardResult(None, info=info)), sample((0.0,))]),
        Group(ROW, 1, [sample(m=RewardResult(None, info={"found": False}))]),
    ]
    assert source_metrics(groups) == {
        "reward/env/mean": 1.5,
        "reward/env/std": 1.5,
        "reward/m/info/found": 0.5,
        "reward/m/info/length": 4.0,
    }


def test_process_rewards_are_part_of_the_value_of_their_source_except_those_of_a_teacher():
    steps = RewardResult(None, steps=((1, 0, 0.5), (1, 2, 0.25)))
    samples = [sample(prm=steps, t=steps), sample(prm=RewardResult(1.0, steps=((1, 0, 1.0),))), sample()]
    metrics = source_metrics([Group(ROW, 0, samples)], {"t": ("data",)})
    assert metrics == {"reward/prm/mean": (0.75 + 2.0) / 2, "reward/prm/std": 0.625}


def test_numbers_about_samples_are_averaged_over_the_samples_that_have_them():
    samples = [sample(), sample(), sample()]
    samples[0].info = {"env/solved": 1.0, "rollout/calls/add": 2.0}
    samples[1].info = {"env/solved": 0.0}
    groups = [Group(ROW, 0, samples[:2]), Group(ROW, 1, samples[2:])]
    assert info_metrics(groups) == {"env/solved": 0.5, "rollout/calls/add": 2.0}


def test_a_sample_of_several_agents_counts_once():
    """The second of two games ended before y had a turn."""
    trajectories = []
    for index, agent, invalid in ((0, "x", 0.0), (0, "y", 0.0), (1, "x", 1.0)):
        turns = [Turn([1], False, agent=agent), Turn([2], True, agent=agent)]
        trajectories.append(Trajectory(ROW, turns, (0, index), info={"env/invalid_move": invalid}))
    assert info_metrics([Group(ROW, 0, trajectories)]) == {"env/invalid_move": 0.5}


def test_failed_samples_count_with_the_lowest_reward_which_is_at_most_0():
    def groups(*rewards):
        return [Group(ROW, n, [Trajectory(ROW, [], (n, 0), reward=r)]) for n, r in enumerate(rewards)]

    assert failure_metrics(groups(1.0, 0.5, None), 1.0, 2.0, {}) == {"reward/mean_with_failed": 0.5}
    assert failure_metrics(groups(1.0, -1.0), 2.0, 2.0, {}) == {"reward/mean_with_failed": -0.5}
    assert failure_metrics(groups(1.0), 0.0, 1.0, {}) == failure_metrics([], 3.0, 0.0, {}) == {}
    of_others = failure_metrics(groups(1.0, 0.0), 2.0, 8.0, {})
    assert of_others == {"reward/mean_with_failed": pytest.approx(0.4)}, "a fifth failed, also in groups of the filter"
    stepped = groups(0.0, 0.0)
    stepped[0].trajectories[0].turns = [Turn([5], True, [-0.1], ((0, 0),), "stop", reward=-2.0)]
    assert failure_metrics(stepped, 2.0, 2.0, {"env": 1.0}) == {"reward/mean_with_failed": -1.5}, "(-2 + 0 - 2 - 2) / 4"
