"""Whole runs with the trainer ``fsdp``: on Ray with vLLM, with a killed rank, resumed on another number of ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from rlhf_testing.tiny import tiny_model
from safetensors.torch import load_file

from tests.forks import Forks
from tests.runs import Workshop, merged
from tests.test_cluster_runs import Training

pytestmark = [pytest.mark.slow, pytest.mark.cluster, pytest.mark.full]

pytest.importorskip("ray")
pytest.importorskip("vllm")
pytest.importorskip("peft")


@pytest.mark.parametrize("adapters", [False, True], ids=["all weights", "adapters"])
def test_a_rank_is_killed_and_the_run_goes_on_with_one(tiny: Workshop, tmp_path: Path, forks: Forks, adapters: bool):
    place = Workshop(tmp_path, tiny_model(tmp_path / "tiny", hidden=32, heads=2, kv_heads=1, head_dim=32), tiny.data)
    config = place.config(
        "grpo",
        "run",
        run={"steps": 4},
        launcher={"cpus": 2},
        trainer={"lr": 1e-2, "ema_decay": 0.5, **({"lora": {"rank": 4}} if adapters else {})},
        generator={"kv_cache_gib": 0.25},
        placement={"policy": {"ranks": 2}, "generator": {"ranks": 1, "share": "policy"}},
        eval={"every": 2},
        data={"eval": [{"path": str(tiny.data), "max_rows": 3, "name": "held_out"}]},
        checkpoint={"every": 1},
        sync={"adapters": "alone" if adapters else "merged"},
    )
    run = Training(forks, place, config, "--backend", "fsdp")
    with run.held_after(2):
        run.workers(engines=False)[1].kill()
    failed = run.finish()
    assert failed.code == 1, failed.said
    assert "policy rank" in failed.said
    assert "Traceback" not in failed.said
    single_rank = merged(config, {"placement": {"policy": {"ranks": 1}}})
    resumed = Training(forks, place, single_rank, "--backend", "fsdp", "--resume").finish()
    assert resumed.code == 0, resumed.said
    lines = resumed.lines()
    assert [line["sync/version"] for line in lines] == [1, 2, 3, 4]
    assert all(line["sync/canary"] < 1e-5 for line in lines)
    size = (resumed.path / "model" / "model.safetensors").stat().st_size
    assert all((2 * line["sync/MiB"] * 2**20 < size) == adapters for line in lines)
    assert all(abs(line["policy/kl_generator"]) < 1e-8 for line in lines)  # sampled with the weights of now
    assert (resumed.path / "model" / "config.json").exists()


def test_two_ranks_send_weights_in_bf16_to_vllm(tiny: Workshop, tmp_path: Path, forks: Forks):
    """Their bytes arrive whole, the engine computes with them what the trainer does, and the export holds them."""
    place = Workshop(tmp_path, tiny_model(tmp_path / "tiny", hidden=32, heads=2, kv_heads=1, head_dim=32), tiny.data)
    config = place.config(
        "grpo",
        "run",
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
