"""Whole runs on Ray give the same numbers as runs in one process, even if workers are killed."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from rlhf_cli.main import main
from rlhf_runtime.output.metrics import MEASURED
from rlhf_testing.tiny import tiny_model

pytestmark = pytest.mark.full

COMPONENTS = Path(__file__).parent / "components.py"
REWARD = """
def score(prompt, completion, row):
    return sum(c in "0123456789" for c in completion) / 6 + (row["answer"] in completion)
"""
TIMING = (*MEASURED, "sync/")


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("workshop")
    tiny_model(folder / "model", hidden=16, heads=2, kv_heads=1)
    rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b), "response": str(a + b)} for a in range(3) for b in range(4)]
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "reward.py").write_text(REWARD)
    return folder


Run = Callable[..., tuple[int, str, list[dict[str, Any]]]]


@pytest.fixture
def run(workshop, tmp_path) -> Run:
    def go(name: str, algorithm: str, *flags: str, **sections: Any) -> tuple[int, str, list[dict[str, Any]]]:
        """(exit code, printed text, metrics by step without times)."""
        config: dict[str, Any] = {
            "run": {"output": str(tmp_path / name), "steps": 4, "seed": 1},
            "algorithm": {"use": algorithm},
            "data": {"train": str(workshop / "data.jsonl"), "batch_size": 4, "max_tokens": 64},
            "policy": {"model": str(workshop / "model"), "dtype": "fp32"},
            "trainer": {"lr": 1e-3},
            "checkpoint": {"every": 1},
        }
        if algorithm != "sft":
            config["sampling"] = {"samples_per_prompt": 3, "max_new_tokens": 6}
            config["reward"] = [{"use": f"file:{workshop / 'reward.py'}"}]
        config |= sections
        file = tmp_path / f"{name}.toml"
        file.write_text(tomli_w.dumps(config))
        output = io.StringIO()
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            code = main(["train", str(file), *flags])
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        steps = [{k: v for k, v in json.loads(x).items() if not k.startswith(TIMING)} for x in lines]
        return code, output.getvalue(), steps

    return go


def same(steps: list[dict[str, Any]], want: list[dict[str, Any]], tolerance: float) -> None:
    assert [set(g) for g in steps] == [set(w) for w in want]
    for g, w in zip(steps, want, strict=True):
        assert g == {k: pytest.approx(v, rel=tolerance, abs=tolerance) for k, v in w.items()}


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
def test_a_run_with_a_killed_trainer_resumes_exactly(run, tmp_path):
    code, output, want = run("local", "sft")
    assert code == 0, output
    flag = tmp_path / "die"
    flag.touch()
    trainer = {"use": f"file:{COMPONENTS}:Mortal", "lr": 1e-3, "flag": str(flag), "at_update": 2}
    code, output, steps = run("ray", "sft", launcher={"use": "ray"}, trainer=trainer)
    assert code != 0
    assert "policy rank 0 (node 127.0.0.1, pid" in output
    assert "died during update()" in output
    assert [s["step"] for s in steps] == [1, 2]
    assert not flag.exists()
    code, output, steps = run("ray", "sft", "--resume", launcher={"use": "ray"}, trainer=trainer)
    assert code == 0, output
    assert "resumed after step 2" in output
    same(steps, want, 0.0)


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
def test_a_killed_engine_changes_no_number(run, tmp_path):
    """Two engines, one of which is killed in the middle of the second step's samples."""
    code, output, want = run("local", "rloo")
    assert code == 0, output
    flag = tmp_path / "die"
    flag.touch()
    generator = {"use": f"file:{COMPONENTS}:OwnCopy", "flag": str(flag)}
    sections = {"launcher": {"use": "ray"}, "placement": {"generator": {"ranks": 2}}, "generator": generator}
    code, output, steps = run("ray", "rloo", **sections)
    assert code == 0, output
    assert not flag.exists(), "the engine was killed"
    same(steps, want, 1e-4)
