"""The example of the reward `code`, every command of it, with fewer steps."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from rlhf_cli.main import main as rlhf
from rlhf_runtime.output.metrics import read_metrics

from examples.code import make_task

pytestmark = pytest.mark.full

EXAMPLE = Path(make_task.__file__).parent


def test_every_sampled_program_is_run_in_a_sandbox(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["make_task.py", "runs/code/task"])
    make_task.main()
    demonstrations = [json.loads(line) for line in Path("runs/code/task/demonstrations.jsonl").read_text().splitlines()]
    plus = [row["response"] for row in demonstrations if row["prompt"].startswith("plus")]
    assert 0.75 < sum("(x+" not in program for program in plus) / len(plus) < 0.85

    assert rlhf(["train", str(EXAMPLE / "sft.toml"), "--run.steps", "3", "--trainer.warmup_steps", "0"]) == 0
    small = ["--run.steps", "1", "--data.batch_size", "2", "--trainer.warmup_steps", "0", "--eval.at_start", "false"]
    assert rlhf(["train", str(EXAMPLE / "grpo.toml"), *small, "--data.eval.0.max_rows", "4"]) == 0
    step = next(line for line in read_metrics(Path("runs/code/grpo/metrics.jsonl")) if line["step"] == 1)
    assert step["reward/code/info/tests"] == 4
    assert 0 <= step["reward/code/mean"] <= 1
    assert step["stream/failed_samples"] == 0
