"""Whole runs of the model's first four layers on every runtime."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.forks import Forks
from tests.real_model.plain import DIALOGUES, QUESTIONS, SAMPLED, Plain, needs_model
from tests.runs import Finished, Workshop, assert_same_run, merged

pytestmark = [pytest.mark.slow, needs_model]


@pytest.fixture
def part(cut: Path, tmp_path: Path) -> Workshop:
    shop = Workshop(tmp_path, cut, tmp_path / "rows.jsonl")
    shop.rows("rows.jsonl", QUESTIONS)
    return shop


def on_two_ranks(launcher: str, **trainer: Any) -> dict[str, Any]:
    return merged(
        SAMPLED,
        {
            "launcher": {"use": launcher, "cpus": 2},
            "placement": {"policy": {"ranks": 2}, "generator": {"ranks": 1, "share": "policy"}},
            "trainer": trainer,
            "run": {"steps": 2},
        },
    )


@pytest.mark.full
def test_a_stopped_run_goes_on_bit_for_bit_and_its_export_is_loaded_by_transformers(part: Workshop) -> None:
    baseline = part.train("grpo", "whole", **SAMPLED)
    part.train("grpo", "resumed", **merged(SAMPLED, {"run": {"stop_after": 2}}))
    resumed = part.train("grpo", "resumed", "--resume", **SAMPLED)
    assert_same_run(baseline, resumed)
    exported = Plain.load(baseline.path / "model", torch.float32)
    assert exported.model.generation_config.eos_token_id in (2, [2])
    assert exported.tokenizer.chat_template == Plain.load(part.model, torch.float32).tokenizer.chat_template


@pytest.mark.full
def test_adapters_learn_and_are_merged_into_the_export(part: Workshop) -> None:
    pytest.importorskip("peft")
    pairs = part.rows("pairs.jsonl", DIALOGUES)
    run = part.train("dpo", "lora", data={"train": str(pairs)}, trainer={"lora": {"rank": 8}, "lr": 1e-3})
    losses = [line["policy/loss"] for line in run.lines()]
    assert losses[0] == pytest.approx(0.6931, abs=1e-4)
    assert losses[-1] < losses[0]


@pytest.mark.full
@pytest.mark.cluster
@pytest.mark.parametrize(
    ("launcher", "trainer"),
    [
        ("processes", {"use": "fsdp"}),
        ("processes", {"use": "deepspeed", "stage": 3}),
        ("ray", {"use": "deepspeed", "stage": 3}),
    ],
)
def test_vllm_and_two_ranks_agree_about_logprobs_and_every_sync_is_proven(
    part: Workshop, forks: Forks, launcher: str, trainer: dict[str, Any]
) -> None:
    for name in ("vllm", *(("ray",) if launcher == "ray" else ()), *(("deepspeed",) if "stage" in trainer else ())):
        pytest.importorskip(name)
    config = part.config(
        "grpo",
        "ranks",
        **merged(on_two_ranks(launcher, **trainer), {"generator": {"use": "vllm", "kv_cache_gib": 0.25}}),
    )
    process = forks.start(part.arguments(config))
    assert process.wait() == 0, process.output[-6000:]
    lines = Finished(Path(config["run"]["output"]), 0).lines()
    assert len(lines) == 2
    for line in lines:
        assert line["policy/kl_generator"] < 1e-4
        assert line["sync/canary"] < 1e-3
