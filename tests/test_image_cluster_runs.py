"""Image-text models on several ranks and engines: FSDP, ZeRO-3 with adapters, and two engines, with vLLM on Ray."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from rlhf_testing.image_models import tiny_image_model

from tests.forks import Forks
from tests.runs import Workshop, merged, require
from tests.test_cluster_runs import Training
from tests.test_image_runs import COLOURS, VLLM, changes, drawn_rows, vision_moved

pytestmark = [pytest.mark.slow, pytest.mark.cluster, pytest.mark.full]

require("ray", "vllm", "deepspeed", "peft")

SHARED = {"policy": {"ranks": 2}, "generator": {"ranks": 1, "share": "policy"}}
"""Two engines on the devices of the ranks. They sleep while the ranks compute."""
CASES: dict[str, dict[str, Any]] = {
    "two engines": {"placement": {"generator": {"ranks": 2}}},
    "fsdp": {"trainer": {"use": "fsdp"}, "placement": SHARED},
    "ZeRO-3 with adapters": {
        "trainer": {"use": "deepspeed", "stage": 3, "lora": {"rank": 4, "vision": True}},
        "placement": SHARED,
    },
}


@pytest.mark.parametrize("case", CASES)
def test_every_engine_samples_with_the_log_probs_of_the_ranks(tmp_path: Path, forks: Forks, case: str) -> None:
    place = Workshop(tmp_path, tiny_image_model(tmp_path / "model", "qwen3_vl"), drawn_rows(tmp_path))
    settings = merged(
        merged(VLLM, {"launcher": {"cpus": 4}, "trainer": {"lr": 1e-2}, "run": {"steps": 3}}), CASES[case]
    )
    done = Training(forks, place, place.config("grpo", "run", **changes(place, "grpo", **settings))).finish()
    assert done.code == 0, done.said
    lines = done.lines()
    assert [line["sync/version"] for line in lines] == [1, 2, 3]
    assert all(line["sync/canary"] < 1e-5 for line in lines)
    assert all(abs(line["policy/kl_generator"]) < 1e-8 for line in lines)  # sampled with the weights of now
    assert all(line["policy/grad_norm"] > 0 for line in lines)
    turns_with_images = [turn for sample in done.samples() for turn in sample["turns"] if turn.get("images")]
    assert len(turns_with_images) > len(COLOURS)
    assert vision_moved(place, done.path)
