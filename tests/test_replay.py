"""A replay of a recorded run, without a generator, gives the same run."""

from __future__ import annotations


def test_a_replayed_run_learns_the_same_and_another_seed_is_refused(shop):
    stream = {"stream": {"staleness": 1}}
    first = shop.train("grpo", "recorded", **stream)
    replay = {"use": "replay", "path": str(first.path / "rollouts")}
    rerun = shop.train("grpo", "replayed", rollout=replay, **stream)
    assert rerun.weights == first.weights
    assert rerun.rollouts() == first.rollouts()
    recorded = [{k: v for k, v in line.items() if not k.startswith("sync/")} for line in first.lines()]
    assert rerun.lines() == recorded
    assert "policy/loss" in recorded[0]
    refused = shop.run("grpo", "another_seed", rollout=replay, run={"seed": 2}, **stream)
    assert (refused.code, "was recorded for row" in refused.said) == (1, True)


def test_groups_that_were_filtered_out_are_left_out_again(shop):
    stream = {"filter": {"min_std": 0.05, "max_rounds": 5}}
    first = shop.train("rloo", "filtered", stream=stream)
    replay = {"use": "replay", "path": str(first.path / "rollouts")}
    rerun = shop.train("rloo", "unfiltered", rollout=replay, stream={"on_failed_sample": "drop_group"})
    assert rerun.weights == first.weights
    assert rerun.rollouts() == first.rollouts()
