"""The GSM8K example on the real data, every command of it, at its small size."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from rlhf_cli.main import main as rlhf

from examples.gsm8k import prepare, run

pytestmark = pytest.mark.full

ROOT = Path(__file__).resolve().parents[1]
DATA = Path(os.environ.get("RLHF_DATA") or ROOT.parent / "shared" / "data")
FILES = tuple(prepare.FILES.values())


def in_this_process(command: Sequence[str]) -> int:
    """What the runner would start as a process."""
    if command[0] == "rlhf":
        return rlhf(command[1:])
    assert command[:2] == ["python", str(run.HERE / "prepare.py")]
    prepare.main(command[2:])
    return 0


@pytest.mark.slow
@pytest.mark.skipif(
    not all((DATA / name).exists() for name in FILES),
    reason=f"{' or '.join(FILES)} is not in {DATA}; set RLHF_DATA to the folder that holds both",
)
def test_the_example_trains_both_models_and_its_format_rate_rises(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    run.main(["--data", str(DATA), "--small"], in_this_process)
    for name in ("sft", "grpo"):
        assert (tmp_path / "runs/gsm8k" / name / "model" / "model.safetensors").exists()
    last = capsys.readouterr().out.strip().splitlines()[-1]
    start, end = map(float, re.search(r"'#### number': ([\d.]+) -> ([\d.]+)$", last).groups())
    assert start < 0.6, "there is something to learn"
    assert end > start + 0.2


def test_only_a_line_feed_ends_a_row(tmp_path, monkeypatch):
    """JSON and `rlhf eval --save` write U+2028 and U+0085 as they are; a model of bytes samples them."""
    text = "a\u2028b\u0085c"
    row = json.dumps({"question": text, "answer": text}, ensure_ascii=False)
    (tmp_path / prepare.FILES["train"]).write_text(f"{row}\n{row}", encoding="utf-8")
    assert prepare.read(str(tmp_path), "train") == [{"question": text, "answer": text}] * 2
    monkeypatch.setattr(run, "RUNS", tmp_path)
    for value in (0.0, 1.0):
        rewards = {"math": {"value": value}, "format": {"value": 1.0}}
        with run.answers("sft").open("a", encoding="utf-8") as file:
            file.write(json.dumps({"prompt": text, "rewards": rewards}, ensure_ascii=False) + "\n")
    assert run.rates("sft") == {"math": 0.5, "format": 1.0}


def test_its_commands_are_processes_of_this_python(capfd):
    assert run.execute(["rlhf", "--version"]) == 0
    assert capfd.readouterr().out.startswith("rlhf ")
    assert run.execute(["rlhf", "no_such_command"]) == 2


def test_missing_data_is_an_error_that_names_the_flag(tmp_path):
    command = [sys.executable, str(run.HERE / "run.py"), "--data", str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    for part in ("gsm8k_train.jsonl does not exist", "--data", "hub", "question, answer", "prepare.py", "failed"):
        assert part in done.stderr
