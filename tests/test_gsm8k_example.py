"""The GSM8K example on the real data, every command of it, with fewer steps."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
DATA = Path(os.environ.get("RLHF_DATA") or ROOT.parent / "shared" / "data")
FILES = ("gsm8k_train.jsonl", "gsm8k_test.jsonl")
RUN = ROOT / "examples" / "gsm8k" / "run.py"


@pytest.mark.slow
@pytest.mark.skipif(
    not all((DATA / name).exists() for name in FILES),
    reason=f"{' or '.join(FILES)} is not in {DATA}; set RLHF_DATA to the folder that holds both",
)
def test_the_example_trains_both_models_and_its_format_rate_rises(tmp_path):
    command = [sys.executable, str(RUN), "--data", str(DATA)]
    command += ["--sft-steps", "110", "--grpo-steps", "8", "--eval-rows", "96"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    for name in ("sft", "grpo"):
        assert (tmp_path / "runs/gsm8k" / name / "model" / "model.safetensors").exists()
    last = done.stdout.strip().splitlines()[-1]
    before, after = map(float, re.search(r"'#### number': ([\d.]+) -> ([\d.]+)$", last).groups())
    assert after > before + 0.1


def test_data_that_is_not_there_is_named_with_what_to_give_instead(tmp_path):
    command = [sys.executable, str(RUN.with_name("prepare.py")), str(tmp_path / "task"), "--data", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    for part in ("gsm8k_train.jsonl does not exist", "--data", "hub", "question, answer"):
        assert part in done.stderr
