"""What an embedded run imports, and when, and how often it loads what a step does not need."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from transformers import AutoTokenizer

from tests.runs import Workshop

SCRIPT = """
import json, sys
from rlhf_cli.main import main
from rlhf_runtime.loop.reports import Reports

modules, begin, record = [], Reports.begin_step, Reports.record

def begin_step(self, step):
    modules.append(sorted(sys.modules))
    return begin(self, step)

def recorded(self, *arguments):
    record(self, *arguments)
    modules.append(sorted(sys.modules))

Reports.begin_step, Reports.record = begin_step, recorded
code = main({words!r})
with open({output!r}, "w") as file:
    json.dump([*modules, sorted(sys.modules)], file)
sys.exit(code)
"""
HEAVY = {
    *("accelerate", "datasets", "deepspeed", "matplotlib", "mlflow", "numpy", "pandas", "peft", "pyarrow", "ray"),
    *("scipy", "sklearn", "sympy", "tokenizers", "torch", "torchvision", "transformers", "triton", "vllm", "wandb"),
}
UNUSED = {"datasets", "deepspeed", "mlflow", "ray", "sklearn", "vllm", "wandb"}
"""Packages of which no part is needed to train on a JSON file in this process."""


def test_a_step_imports_no_large_package_and_the_run_none_that_it_does_not_use(shop: Workshop) -> None:
    words = shop.arguments(shop.config("grpo", "run", run={"steps": 1}))
    output = shop.folder / "modules.json"
    script = SCRIPT.format(words=words, output=str(output))
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, env=environment)
    assert run.returncode == 0, run.stderr
    first, second, last = ({name.partition(".")[0] for name in modules} for modules in json.loads(output.read_text()))
    assert (second - first) & HEAVY == set(), "imported inside the first step"
    assert last & UNUSED == set()


def test_the_tokenizer_is_loaded_once_for_prompts_and_answers_and_once_for_exports(
    shop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    load, loads = AutoTokenizer.from_pretrained, []
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda *a, **k: loads.append(a) or load(*a, **k))
    shop.train("grpo", "run", run={"steps": 1})
    assert len(loads) == 2
