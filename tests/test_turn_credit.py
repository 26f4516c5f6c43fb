"""Whole runs in an environment with rewards at its turns: recording, evaluation, replay and refusals."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from rlhf_cli.main import main

from tests.runs import Workshop, merged

GAME: dict[str, Any] = {
    "rollout": {"use": "multi_turn"},
    "env": {"use": "number_game", "max_turns": 3, "credit": "step"},
}


def of_turns(sample: dict[str, Any]) -> float:
    return math.fsum(turn["reward"] for turn in sample["turns"] if turn["sampled"])


def test_each_reward_counts_once_and_the_filter_reads_all_of_them(shop: Workshop) -> None:
    """The reward source alone is never below 0. So the filter rejects groups only if it also reads the game's costs."""
    run = shop.train("reinforce_pp", "run", **GAME, stream={"filter": {"low": -0.6, "max_rounds": 9}})
    samples = list(run.samples())
    assert any(len([t for t in s["turns"] if t["sampled"]]) == 3 for s in samples)
    for sample in samples:
        (digits,) = sample["rewards"].values()
        assert sample["reward"] == digits["value"]
        assert sample["score"] == pytest.approx(digits["value"] + of_turns(sample), abs=1e-12)
    for number, line in enumerate(run.lines(), 1):
        step = list(run.samples_of(f"step-{number:06d}.arrow"))
        assert line["reward/steps"] == pytest.approx(math.fsum(map(of_turns, step)) / len(step), rel=1e-6)
        assert line["reward/mean"] == pytest.approx(math.fsum(s["reward"] for s in step) / len(step))
        for group in {s["group"] for s in step}:
            scores = [s["score"] for s in step if s["group"] == group]
            assert math.fsum(scores) / len(scores) > -0.6
    assert sum(line["stream/filtered"] for line in run.lines()) > 0


def test_a_replayed_run_learns_the_same_and_keeps_the_section(shop: Workshop) -> None:
    first = shop.train("reinforce_pp", "recorded", **GAME)
    replay = {"use": "replay", "path": str(first.path / "rollouts")}
    rerun = shop.train("reinforce_pp", "replayed", **merged(GAME, {"rollout": replay}))
    assert rerun.weights == first.weights
    assert rerun.rollouts() == first.rollouts()
    summed = shop.train("reinforce_pp", "summed", rollout=replay)
    assert summed.weights != first.weights


def test_an_evaluation_sums_them(shop: Workshop) -> None:
    """`rlhf eval` of the same run file sums them too."""
    data = {"data": {"eval": [{"path": str(shop.data), "name": "held_out"}]}}
    run = shop.train("reinforce_pp", "placed", **GAME, **data, reward=None)
    config = shop.config("reinforce_pp", "placed", **GAME, **data, reward=None)
    assert run.lines()[-1]["reward/mean"] == 0.0
    reward = run.lines()[-1]["eval/reward"]
    assert reward < 0, "three wrong questions cost"
    file = shop.arguments(config)[1]
    out = shop.folder / "eval.json"
    assert main(["eval", file, "--policy.model", str(run.path / "model"), "--save", str(out)]) == 0
    samples = [json.loads(line) for line in out.read_text().splitlines()]
    assert math.fsum(s["reward"] for s in samples) / len(samples) == pytest.approx(reward)
