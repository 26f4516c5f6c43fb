"""Rounds: several steps train on samples of one policy. Runs killed inside a round, and a generator with a copy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.forks import Forks
from tests.runs import Finished, Workshop, assert_same_run, read_rows
from tests.test_resume import STEPS, Runs, config

OWN_COPY = Path(__file__).parents[1] / "plugins" / "backends" / "ray" / "tests" / "components.py"
"""A generator with its own weights, in this process."""


def synced(run: Finished) -> list[float | None]:
    """Per step, the version of the weights that were sent after it; None if none were sent."""
    return [line.get("sync/version") for line in run.lines()]


def versions(run: Finished) -> list[set[int]]:
    """Per step, the versions of weights that its samples record, turn by turn."""
    return [
        {version for sample in run.samples_of(name) for turn in sample["turns"] for _, version in turn["versions"]}
        for name in run.rollouts()
    ]


ALGORITHMS: dict[str, dict[str, Any]] = {
    "grpo": {},
    "rejection_sampling": {},
    "online_dpo": {"snapshot_every": 3},  # iterative: a reference for each round, which is in the checkpoint
}


KILLED = [
    pytest.param(algorithm, event, marks=() if (algorithm, event) == ("grpo", "saved 2") else pytest.mark.full)
    for algorithm in ALGORITHMS
    for event in ("saved 2", "saved 4")
]


@pytest.mark.parametrize(("algorithm", "event"), KILLED)
def test_killed_inside_a_round(forks: Forks, shop: Workshop, algorithm: str, event: str) -> None:
    runs = Runs(forks, shop)
    rounds = {"stream": {"round": 3}, "algorithm": ALGORITHMS[algorithm], "checkpoint": {"every": 1}}
    baseline, broken = (config(shop, algorithm, name, **rounds) for name in ("whole", "broken"))
    reference = runs.start(baseline)
    output = runs.die_at(broken, event)
    newest = max((output / "checkpoints").glob("step-*"))
    assert newest.name == f"step-00000{event[-1]}"
    assert len(read_rows(newest / "ready.arrow")) == 4 * 3, "one batch, generated and not trained on"
    assert (newest / "roles" / "reference").exists() == (algorithm == "online_dpo")
    finished, expected = runs.resume(broken), runs.result(baseline, reference)
    assert expected.code == 0, expected.err
    assert [line["stream/version"] for line in finished.lines()] == [0, 0, 0, 3, 3]
    assert len(finished.lines()) == STEPS
    assert_same_run(finished, expected)


def test_weights_are_sent_only_before_a_step_that_samples(shop: Workshop) -> None:
    """Weights are sent once per round and before an evaluation; every sample records the right version."""
    settings = {"generator": {"use": f"file:{OWN_COPY}:OwnCopy"}, "launcher": {"use": "local"}, "run": {"steps": 6}}
    changes = {**settings, "stream": {"round": 3}}
    held_out = {"data": {"eval": [{"path": str(shop.data), "max_rows": 2}]}, "eval": {"every": 2, "samples": 1}}
    module = shop.train("grpo", "module", stream={"round": 3}, run={"steps": 6})
    copy = shop.train("grpo", "copy", **changes)
    evaluated = shop.train("grpo", "evaluated", **{**changes, **held_out})
    assert synced(copy) == synced(module) == [None, None, 3, None, None, 6]
    assert synced(evaluated) == [None, 2, 3, 4, None, 6]
    assert all("sync/canary" in line for line in copy.lines() if "sync/version" in line)
    for run in (module, copy, evaluated):
        assert versions(run) == [{0}] * 3 + [{3}] * 3
    assert copy.weights == module.weights == evaluated.weights
