"""A replay of a recorded run, without a generator, gives the same run."""

from __future__ import annotations

import pytest


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_replayed_run_learns_the_same(shop, staleness):
    stream = {"stream": {"staleness": staleness}}
    first = shop.train("grpo", "recorded", **stream)
    rerun = shop.train("grpo", "replayed", rollout={"use": "replay", "path": str(first.path / "rollouts")}, **stream)
    assert rerun.weights == first.weights
    assert rerun.rollouts() == first.rollouts()
    recorded = [{k: v for k, v in line.items() if not k.startswith("sync/")} for line in first.lines()]
    assert rerun.lines() == recorded
    assert "policy/loss" in recorded[0]


def test_groups_that_were_filtered_out_are_left_out_again(shop):
    stream = {"filter": {"min_std": 0.05, "max_rounds": 5}}
    first = shop.train("rloo", "filtered", stream=stream)
    replay = {"use": "replay", "path": str(first.path / "rollouts")}
    rerun = shop.train("rloo", "unfiltered", rollout=replay, stream={"on_failed_sample": "drop_group"})
    assert rerun.weights == first.weights
    assert rerun.rollouts() == first.rollouts()


def test_a_replay_with_another_seed_is_refused(shop):
    first = shop.train("rloo", "one_seed")
    replay = {"use": "replay", "path": str(first.path / "rollouts")}
    refused = shop.run("rloo", "another_seed", rollout=replay, run={"seed": 2})
    assert refused.code == 1
    assert "was recorded for row" in refused.said
