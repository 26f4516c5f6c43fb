"""The example in which an agent that knows nothing of rlhf is trained, with short runs."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from rlhf_runtime.checkpoint.saved_groups import recorded

ROOT = Path(__file__).resolve().parents[1]
SHORT = ("--run.steps", "3", "--data.batch_size", "2", "--sampling.samples_per_prompt", "2", "--eval.max_rows", "2")


@pytest.mark.full
def test_the_agent_is_trained_on_what_it_was_answered(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "examples" / "agent", tmp_path / "examples" / "agent")
    assert "rlhf" not in (tmp_path / "examples/agent/shop.py").read_text().replace("nothing of rlhf", "")

    def run(*words: str) -> None:
        done = subprocess.run([sys.executable, *words], cwd=tmp_path, capture_output=True, text=True, timeout=1200)
        assert done.returncode == 0, done.stderr[-3000:]

    run("examples/agent/make_task.py", "runs/agent/task")
    run("-m", "rlhf_cli.main", "train", "examples/agent/warm_start.toml", "--run.steps", "100")
    run("-m", "rlhf_cli.main", "train", "examples/agent/rloo.toml", *SHORT)
    lines = [json.loads(line) for line in (tmp_path / "runs/agent/rloo/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2, 3]
    assert "eval/pass@1" in lines[0]
    for line in lines[1:]:
        assert line["rollout/sequences"] == 1, "each request goes on from the answer before"
        assert line["policy/kl_generator"] < 1e-5
        samples = recorded(tmp_path / f"runs/agent/rloo/rollouts/step-{line['step']:06}.arrow")
        assert {sample["reward"] for _, sample in samples} <= {0.0, 1.0}
    assert sum(line["rollout/calls/look_up"] for line in lines[1:]) > 0


@pytest.mark.full
@pytest.mark.slow
def test_the_page_says_how_many_held_out_questions_are_in_the_training_data(tmp_path: Path) -> None:
    script = ROOT / "examples/agent/make_task.py"
    subprocess.run([sys.executable, script, tmp_path], check=True, timeout=600)
    held_out, tasks, demonstrations = (
        [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        for name in ("held_out", "tasks", "demonstrations")
    )
    conversations = {tuple(m["content"] for m in row["messages"] if m["content"]) for row in demonstrations}
    texts = [(task["prompt"], *task["catalogue"].values(), task["price"]) for task in held_out]
    solutions = [text for text in texts if text in conversations]
    assert {len(text) for text in solutions} == {3}, "a chain of one item"
    repeats = sum(task in tasks for task in held_out)
    counts = f"{repeats} of the {len(held_out)} are also training questions, and demonstrations answer {len(solutions)}"
    assert counts in (ROOT / "examples/agent/README.md").read_text()
