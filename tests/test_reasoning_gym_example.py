"""The example of reasoning-gym with fewer questions and steps."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from rlhf_cli.main import main

from tests.pages import script

pytestmark = pytest.mark.full

EXAMPLE = Path(__file__).resolve().parents[1] / "examples/reasoning_gym"
SHORT = ("--steps", "2", "--trainer.warmup_steps", "0")


def test_the_example_trains_and_no_held_out_word_is_trained_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_task = script(EXAMPLE / "make_task.py")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(make_task, "QUESTIONS", 300)
    monkeypatch.setattr(make_task, "HELD_OUT", 20)
    monkeypatch.setattr(sys, "argv", ["make_task.py", "runs/reasoning_gym/task"])
    make_task.main()
    names = ("questions.jsonl", "held_out.jsonl")
    lines = [(tmp_path / "runs/reasoning_gym/task" / name).read_text().splitlines() for name in names]
    trained, held_out = ({json.loads(line)["prompt"].lower() for line in part} for part in lines)
    assert len(held_out) == 20
    assert not trained & held_out
    assert main(["train", str(EXAMPLE / "sft.toml"), *SHORT]) == 0
    assert main(["train", str(EXAMPLE / "rloo.toml"), *SHORT]) == 0
    metrics = (tmp_path / "runs/reasoning_gym/rloo/metrics.jsonl").read_text().splitlines()
    assert all("eval/pass@1" in json.loads(metrics[n]) for n in (0, -1))
