"""The example in which a policy learns to ask a calculator."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.full
def test_the_policy_learns_to_call_the_tool(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "examples" / "tools", tmp_path / "examples" / "tools")
    done = subprocess.run(
        [sys.executable, "examples/tools/run.py"], cwd=tmp_path, capture_output=True, text=True, timeout=1800
    )
    assert done.returncode == 0, done.stderr[-3000:]
    accuracy = [float(number) for number in re.findall(r"step \d+: ([\d.]+)", done.stdout.splitlines()[-2])]
    asks = [float(number) for number in re.findall(r"[\d.]+", done.stdout.splitlines()[-1])]
    assert accuracy[-1] > accuracy[0] + 0.4
    assert asks[-1] > 0.9 > 0.4 > asks[0]
