"""Whole runs whose samples are played by an environment of verifiers, in waves and in a continuous stream."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

import pytest
from rlhf.plugins import Plugins
from rlhf_cli.main import main
from rlhf_cli.plugins import isolate
from rlhf_testing.tiny import tiny_model

from tests.continuous import simulated
from tests.runs import Workshop, merged

pytestmark = pytest.mark.full
ENVIRONMENTS = Path(__file__).parents[1] / "plugins/rollouts/verifiers/tests/environments"


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    """``RLHF_TEST_ENVIRONMENTS`` names a folder in which the environment is kept."""
    parent = os.environ.get("RLHF_TEST_ENVIRONMENTS")
    folder = (Path(parent) if parent else tmp_path_factory.getbasetemp()) / "verifiers"
    if not folder.exists():
        isolate(Plugins.discover().resolve("rollout", "verifiers"), folder, sys.executable, [])
    return str(folder / "bin" / "python")


@pytest.fixture
def shop(tmp_path, monkeypatch):
    monkeypatch.chdir(ENVIRONMENTS)
    model = tiny_model(tmp_path / "model", chat_template="default")
    shop = Workshop(tmp_path, model, tmp_path / "data.jsonl")
    shop.rows("data.jsonl", [{"prompt": f"{n}+1=", "index": n, "answer": ""} for n in range(4)])
    shop.rows("held_out.jsonl", [{"prompt": f"{4 + n}+1=", "index": n, "split": "eval"} for n in range(2)])
    return shop


def played(shop, python, **changes):
    rollout = {"use": "verifiers", "id": "adding", "args": {"max_turns": 2}, "python": python}
    data = {"max_tokens": 400, "batch_size": 2, "eval": [str(shop.folder / "held_out.jsonl")]}
    return merged({"rollout": rollout, "reward": None, "data": data}, changes)


def test_a_run_learns_from_the_rubric_and_chooses_by_its_metric(shop, python, capsys):
    config = played(shop, python, run={"steps": 2}, eval={"every": 1, "metric": "env/length"})
    run = shop.train("grpo", "waves", **config)
    samples = list(run.samples())
    assert len(samples) == 2 * 2 * 3
    assert all(sample["reward"] == sample["turns"][-1]["reward"] for sample in samples)
    assert all(line["env/num_turns"] > 0 and line["eval/env/length"] > 0 for line in run.lines())
    assert main(["samples", str(run.path), "--random", "2"]) == 0
    assert re.search(r"env/length 3, env/num_turns 2, env/right [01], rollout/sequences 1\n", capsys.readouterr().out)

    _, path = shop.arguments(shop.config("grpo", "unused", **played(shop, python)))
    capsys.readouterr()
    assert main(["eval", path, "--json"]) == 0
    metrics = json.loads(capsys.readouterr().out)
    assert metrics["prompts"] == 2
    assert metrics["env/num_turns"] > 0


def test_a_continuous_stream(shop, python):
    changes = played(shop, python, run={"steps": 3}, data={"eval": []}, checkpoint=None)
    rows = {"train": str(shop.folder / "data.jsonl")}
    run = shop.train_config(merged(simulated(shop, "continuous", **changes), {"env": None, "data": rows}))
    assert len(list(run.samples())) == 3 * 2 * 2
