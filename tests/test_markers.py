"""Tests that start the cluster runtime have the marker ``cluster``, so that they can be left out."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.members import ROOT

STARTS = (r'importorskip\("(ray|vllm|deepspeed)"\)', r"\btwo_cpus\b", r"\bimports\.vllm\(120", r'\b(BIN / "ray"|RAY), ')
"""Words in the sources of tests that start it."""
FILES = sorted(
    p
    for folder in ("core", "libraries", "runtime", "testing", "cli", "plugins/commands", "tests")
    for p in (ROOT / folder).rglob("test_*.py")
)


def test_files_that_start_a_cluster_have_the_marker():
    asking = [
        path for path in FILES if re.search("|".join(STARTS), path.read_text()) and path.name != "test_markers.py"
    ]
    assert len(asking) >= 8
    assert [str(path) for path in asking if "pytest.mark.cluster" not in path.read_text()] == []


@pytest.mark.full
def test_the_marker_cluster_leaves_out_the_tests_of_clusters():
    by_its_folder = "plugins/backends/ray/tests/test_gpus.py"
    paths = [by_its_folder, "tests/test_divided_layers.py", "tests/test_precompute.py"]
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", "-m", "not cluster"]
    done = subprocess.run([*command, *paths], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stdout
    left = [line for line in done.stdout.splitlines() if "::" in line]
    assert len(left) >= 5
    assert {line.partition("::")[0] for line in left} == {"tests/test_precompute.py"}
    assert not any("on_ray" in line for line in left)
