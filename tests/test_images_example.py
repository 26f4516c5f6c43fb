"""The example of images: what its tables say."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.full
def test_a_model_learns_to_name_colours(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "examples" / "images", tmp_path / "examples" / "images")
    done = subprocess.run(
        [sys.executable, "examples/images/run.py"], cwd=tmp_path, capture_output=True, text=True, timeout=1800
    )
    assert done.returncode == 0, done.stderr[-3000:]
    shares = [float(part.rpartition(": ")[2]) for part in done.stdout.rpartition("held-out success: ")[2].split(",")]
    assert shares[-1] > shares[0] + 0.15, shares
