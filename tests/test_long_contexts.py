"""Whole runs whose ranks divide rows: the numbers of the embedded run, a killed rank, a resume on one rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from rlhf_testing.tiny import tiny_model

from tests.forks import Forks
from tests.runs import Workshop, merged
from tests.test_cluster_runs import Training
from tests.test_divided_layers import assert_equal

pytestmark = [pytest.mark.slow, pytest.mark.cluster, pytest.mark.full]

pytest.importorskip("vllm")

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


def test_a_rank_is_killed_and_the_run_goes_on_with_whole_rows(tiny: Workshop, tmp_path: Path, forks: Forks):
    place = Workshop(tmp_path, tiny_model(tmp_path / "tiny", hidden=32, heads=2, kv_heads=1, head_dim=32), tiny.data)
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
    run = Training(forks, place, config)
    with run.held_after(2):
        run.workers(engines=False)[1].kill()
    failed = run.finish()
    assert failed.code == 1, failed.said
    assert "policy rank" in failed.said
    assert "Traceback" not in failed.said
    single_rank = merged(config, {"placement": {"policy": {"ranks": 1}}, "trainer": {"sequence_parallel": 1}})
    resumed = Training(forks, place, single_rank, "--resume").finish()
    assert resumed.code == 0, resumed.said
    lines = resumed.lines()
    assert [line["sync/version"] for line in lines] == [1, 2, 3, 4]
    assert all(line["sync/canary"] < 1e-5 for line in lines)
    assert all(abs(line["policy/kl_generator"]) < 1e-8 for line in lines)  # sampled with the weights of now
    assert (resumed.path / "model" / "config.json").exists()
