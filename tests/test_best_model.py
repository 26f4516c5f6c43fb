"""What evaluations leave behind: the answers of each, and the model of the best."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from rlhf_cli.main import main
from rlhf_runtime.checkpoint.saved_groups import recorded
from safetensors.torch import load_file

from tests.runs import Finished, Workshop


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def evaluated(shop: Workshop, **changes: Any) -> dict[str, Any]:
    """Three steps with an evaluation and an export after each."""
    rows = [{"prompt": f"{n}+1=", "response": "zebra"} for n in range(4)]
    held_out = shop.rows("held_out.jsonl", rows)
    base = {"data": {"eval": str(held_out)}, "eval": {"every": 1}, "checkpoint": {"export_every": 1}}
    return {**base, "trainer": {"lr": 3e-2}, **changes}


def best_of(run: Finished) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((run.path / "model-best" / "best.json").read_text())
    return content


def test_the_model_of_the_best_evaluation_is_exported(shop: Workshop) -> None:
    run = shop.train("sft", "run", **evaluated(shop, eval={"every": 1, "metric": "loss", "mode": "max"}))
    losses = [line["eval/loss"] for line in run.lines()]
    step = losses.index(max(losses)) + 1
    assert best_of(run) == {"step": step, "metric": "eval/loss", "value": max(losses)}
    default = shop.train("sft", "least", **evaluated(shop))
    assert best_of(default)["step"] == losses.index(min(losses)) + 1 != step
    for candidate, best_step in ((run, step), (default, best_of(default)["step"])):
        folder = candidate.path / ("model" if best_step == 3 else f"exports/step-{best_step:06d}")
        assert same(weights(candidate.path / "model-best"), weights(folder))
    for name in ("save_best", "export_best"):
        checkpoint = {"export_every": 1, name: False}
        assert not (shop.train("sft", name, **evaluated(shop, checkpoint=checkpoint)).path / "model-best").exists()


def test_export_best_without_evaluations_is_refused(shop: Workshop) -> None:
    refused = shop.run("sft", "run", "--dry-run", checkpoint={"export_best": False})
    assert refused.code != 0
    assert "checkpoint.export_best = false" in refused.said


def test_a_resume_exports_the_best_model_that_a_kill_came_before(shop: Workshop) -> None:
    changes = evaluated(shop, eval={"every": 1, "metric": "loss", "mode": "max"}, checkpoint={"every": 1})
    baseline = shop.train("sft", "whole", **changes)
    stopped = shop.train("sft", "run", "--run.stop_after", str(best_of(baseline)["step"]), **changes)
    shutil.rmtree(stopped.path / "model-best")
    resumed = shop.train("sft", "run", "--resume", **changes)
    assert best_of(resumed) == best_of(baseline)
    assert same(weights(resumed.path / "model-best"), weights(baseline.path / "model-best"))


@pytest.mark.parametrize("algo", ["grpo", "sft"])
def test_the_answers_of_every_evaluation_are_kept(shop: Workshop, algo: str) -> None:
    held_out = shop.rows("held_out.jsonl", [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(4)])
    changes: dict[str, Any] = {"data": {"eval": str(held_out)}, "eval": {"every": 2, "at_start": True}}
    if algo == "sft":
        reward = [{"use": f"file:{shop.file('score.py', 'async def score(prompt, completion, row): return 0.5')}"}]
        held_out.write_text("".join(json.dumps({"prompt": f"{n}+1=", "response": "1"}) + "\n" for n in range(4)))
        changes |= {"reward": reward, "sampling": {"max_new_tokens": 4}}
    run = shop.train(algo, "run", **changes)
    files = sorted(path.name for path in (run.path / "evaluations").iterdir())
    assert files == [f"step-{step:06d}.jsonl" for step in (0, 2, 3)]
    samples = [sample for _, sample in recorded(run.path / "evaluations" / "step-000002.jsonl")]
    assert [sample["row"]["index"] for sample in samples] == [0, 1, 2, 3]
    mean = sum(sample["reward"] for sample in samples) / 4
    assert run.lines()[2]["eval/reward"] == pytest.approx(mean)
    out = shop.folder / "demonstrations.jsonl"
    words = (
        "data",
        "export",
        run.path / "evaluations" / files[0],
        "--form",
        "demonstrations",
        "--truncated",
        "-o",
        out,
    )
    assert main([str(word) for word in words]) == 0
    if algo == "grpo":
        plain = shop.train(algo, "off", **changes, checkpoint={"save_rollouts": False})
        assert not (plain.path / "evaluations").exists()
