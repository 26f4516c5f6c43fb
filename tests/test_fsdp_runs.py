"""Whole runs with the trainer ``fsdp``: on Ray with vLLM, with a killed rank, resumed on another number of ranks."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from tests.forks import Forks
from tests.runs import Workshop, require
from tests.test_cluster_runs import Training, kill_a_rank_and_go_on_with_one

pytestmark = [pytest.mark.slow, pytest.mark.cluster, pytest.mark.full]

require("ray", "vllm", "peft")


@pytest.mark.parametrize("adapters", [False, True], ids=["all weights", "adapters"])
def test_a_rank_is_killed_and_the_run_goes_on_with_one(place: Workshop, forks: Forks, adapters: bool):
    config = place.config(
        "grpo",
        "adapters" if adapters else "all weights",
        run={"steps": 4},
        launcher={"cpus": 2},
        trainer={"lr": 1e-2, "ema_decay": 0.5, **({"lora": {"rank": 4}} if adapters else {})},
        generator={"kv_cache_gib": 0.25},
        placement={"policy": {"ranks": 2}, "generator": {"ranks": 1, "share": "policy"}},
        eval={"every": 2},
        data={"eval": [{"path": str(place.data), "max_rows": 3, "name": "held_out"}]},
        checkpoint={"every": 1},
        sync={"adapters": "alone" if adapters else "merged"},
    )
    resumed = kill_a_rank_and_go_on_with_one(forks, place, config, "--backend", "fsdp")
    size = (resumed.path / "model" / "model.safetensors").stat().st_size
    assert all((2 * line["sync/MiB"] * 2**20 < size) == adapters for line in resumed.lines())


def test_two_ranks_send_weights_in_bf16_to_vllm(place: Workshop, forks: Forks):
    """Their bytes arrive whole, the engine computes with them what the trainer does, and the export holds them."""
    config = place.config(
        "grpo",
        "bf16",
        run={"steps": 2},
        policy={"dtype": "auto", "storage": "bf16"},
        launcher={"cpus": 2},
        trainer={"lr": 1e-2},
        generator={"kv_cache_gib": 0.25},
        placement={"policy": {"ranks": 2}, "generator": {"share": "policy"}},  # an engine per rank
    )
    run = Training(forks, place, config, "--backend", "fsdp").finish()
    assert run.code == 0, run.said
    lines = run.lines()
    assert [line["sync/version"] for line in lines] == [1, 2]
    assert all(line["sync/canary"] < 0.05 for line in lines)
    assert {t.dtype for t in load_file(run.path / "model" / "model.safetensors").values()} == {torch.bfloat16}


def test_a_run_is_not_resumed_with_another_trainer(shop: Workshop):
    options = {"use": "fsdp", "lr": 1e-2, "device": "cpu"}
    shop.train("sft", "changed", trainer=options, run={"steps": 1}, checkpoint={"every": 1})
    changes = {"steps": 2, "resume": True}
    for other in ("torch", "deepspeed"):
        refused = shop.run("sft", "changed", trainer={**options, "use": other}, run=changes)
        assert refused.code != 0
        assert "trainer.use" in refused.said
    assert shop.run("sft", "changed", trainer=options, run=changes).code == 0
