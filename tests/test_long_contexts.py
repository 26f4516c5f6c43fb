"""Whole runs whose ranks divide rows: the numbers of the embedded run, a killed rank, a resume on one rank."""

from __future__ import annotations

from typing import Any

import pytest

from tests.forks import Forks
from tests.runs import Workshop, merged, require
from tests.test_cluster_runs import kill_a_rank_and_go_on_with_one
from tests.test_divided_layers import assert_equal

pytestmark = [pytest.mark.slow, pytest.mark.cluster, pytest.mark.full]

require("vllm")

ROWS: dict[str, Any] = {
    "launcher": {"use": "processes", "cpus": 2},
    "trainer": {"use": "fsdp", "sequence_parallel": 2},
    "placement": {"policy": {"ranks": 2}},
}
RAGGED = {"policy": {"micro_tokens": 40}}


def test_supervised(shop):
    embedded = shop.train("sft", "embedded", **RAGGED)
    assert_equal(shop.train("sft", "divided", **RAGGED, **ROWS), embedded)


def test_recorded_rollouts(shop):
    embedded = shop.train("grpo", "recorded", **RAGGED)
    replay = {"rollout": {"use": "replay", "path": str(embedded.path / "rollouts")}}
    zero = merged(ROWS, {"trainer": {"use": "deepspeed", "stage": 3}})
    assert_equal(shop.train("grpo", "replayed", **RAGGED, **zero, **replay), embedded)


def test_a_rank_is_killed_and_the_run_goes_on_with_whole_rows(place: Workshop, forks: Forks):
    config = place.config(
        "grpo",
        "run",
        run={"steps": 4},
        launcher={"use": "processes", "cpus": 2},
        trainer={"use": "fsdp", "lr": 1e-2, "ema_decay": 0.5, "sequence_parallel": 2},
        generator={"use": "vllm", "kv_cache_gib": 0.25},
        placement={"policy": {"ranks": 2}, "generator": {"ranks": 1, "share": "policy"}},
        checkpoint={"every": 1},
    )
    kill_a_rank_and_go_on_with_one(forks, place, config, trainer={"sequence_parallel": 1})
