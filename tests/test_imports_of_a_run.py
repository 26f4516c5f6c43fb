"""What an embedded run imports, and when, and how often it loads what a step does not need."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from tests.runs import Finished, Workshop, assert_same_run

SCRIPT = """
import atexit, json, runpy, sys
from rlhf_runtime.loop.reports import Reports

modules, begin, record = [], Reports.begin_step, Reports.record

def begin_step(self, step):
    modules.append(sorted(sys.modules))
    return begin(self, step)

def recorded(self, *arguments):
    record(self, *arguments)
    modules.append(sorted(sys.modules))

Reports.begin_step, Reports.record = begin_step, recorded
@atexit.register
def write():
    with open({output!r}, "w") as file:
        json.dump([*modules, sorted(sys.modules)], file)

sys.argv = {words!r}
runpy.run_path(sys.argv[0], run_name="__main__")
"""
HEAVY = {
    *("accelerate", "datasets", "deepspeed", "matplotlib", "mlflow", "numpy", "pandas", "peft", "pyarrow", "ray"),
    *("scipy", "sklearn", "sympy", "tokenizers", "torch", "torchvision", "transformers", "triton", "vllm", "wandb"),
}
UNUSED = {"datasets", "deepspeed", "mlflow", "ray", "sklearn", "vllm", "wandb"}
"""Packages of which no part is needed to train on a JSON file in this process."""


def test_the_installed_command_trains_and_imports_nothing_large_in_a_step_and_nothing_unused(shop: Workshop) -> None:
    """The command is the file that `pip install` writes. One process shows both, because its start takes seconds."""
    output = shop.folder / "modules.json"
    command = str(Path(sys.executable).with_name("rlhf"))
    assert subprocess.run([command, "--version"], capture_output=True, text=True, check=True).stdout.startswith("rlhf ")
    words = [command, *shop.arguments(shop.config("grpo", "run"))]
    script = SCRIPT.format(words=words, output=str(output))
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith(f"finished: {shop.folder / 'run'}\nreport: {shop.folder / 'run/report.html'}\n")
    assert "3 of 3 steps" in done.stdout
    assert_same_run(Finished(shop.folder / "run", 0), shop.train("grpo", "here"))
    names = [{name.partition(".")[0] for name in modules} for modules in json.loads(output.read_text())]
    assert len(names) == 7, "before and after each of three steps, and at the end"
    for first, second in zip(names[0:6:2], names[1:6:2], strict=True):
        assert (second - first) & HEAVY == set(), "imported inside a step"
    assert names[-1] & UNUSED == set()


def test_the_tokenizer_is_loaded_once_for_prompts_and_answers_and_once_for_exports(
    shop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    load, loads = AutoTokenizer.from_pretrained, []
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda *a, **k: loads.append(a) or load(*a, **k))
    shop.train("grpo", "run", run={"steps": 1})
    assert len(loads) == 2
