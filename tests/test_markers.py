"""Tests that start the cluster runtime have the marker ``cluster``, so that they can be left out, ``make quick`` finds
the tests that take long, and no test waits for the one before, for threads of another or for the garbage of all."""

from __future__ import annotations

import gc
import os
import re
import socket
import subprocess
import sys

import pytest

from tests.members import ROOT

STARTS = (r'(skip|require)\("(ray|vllm|deepspeed)"', r"\btwo_cpus\b", r"\bimports\.vllm\(120", r'\b(BIN / "ray"|RAY), ')
"""Words in the sources of tests that start it."""
FILES = sorted(
    p
    for folder in ("core", "libraries", "runtime", "testing", "cli", "tests")
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


SYSTEMS = """
import os, pytest, sys

this, sys.platform = sys.platform, os.environ["SYSTEM"]

@pytest.mark.linux("the kernel")
def test_of_linux(): pass
def test_of_all(): sys.platform = this  # which pytest needs at its end
"""


@pytest.mark.parametrize(
    ("system", "summary"), [("linux", "2 passed"), ("darwin", "needs Linux: the kernel\n1 passed, 1 skipped")]
)
def test_other_systems_skip_the_tests_that_need_linux(tmp_path, system, summary):
    (tmp_path / "test_systems.py").write_text(SYSTEMS)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = linux\n")
    command = [sys.executable, "-m", "pytest", "-qrs", "-p", "conftest", "-p", "no:cacheprovider", str(tmp_path)]
    environment = {**os.environ, "SYSTEM": system}
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, env=environment)
    assert summary in done.stdout


LENGTHS = """
import subprocess, sys, time

BUSY = "import time\\nend = time.process_time() + 0.5\\nwhile time.process_time() < end: pass"

def test_short(): pass
def test_waits(): time.sleep(0.5)
def test_computes(): exec(BUSY, {})
def test_starts_a_child(): subprocess.run([sys.executable, "-c", BUSY], check=True)
"""


@pytest.mark.linux("elsewhere there is no limit")
def test_a_test_that_takes_more_processor_time_than_allowed_fails(tmp_path):
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "test_lengths.py").write_text(LENGTHS)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "conftest", "-p", "no:cacheprovider"]
    command += ["--longest-case", "0.4", f"--rootdir={tmp_path}", "-c", str(tmp_path / "pytest.ini"), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert re.findall(r"^FAILED \S+::(\w+)", done.stdout, re.MULTILINE) == ["test_computes", "test_starts_a_child"]
    assert "--longest-case allows 0.4 s" in done.stdout


def test_messages_about_reruns_do_not_wait_for_each_other(request):
    database = getattr(request.config, "failures_db", None)
    if not hasattr(database, "sock"):
        pytest.skip("pytest-rerunfailures connects the processes of pytest -n only")
    assert database.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_an_engine_does_not_show_the_objects_of_all_tests_to_the_garbage_collector():
    frozen = gc.get_freeze_count()
    gc.unfreeze()  # as vLLM does
    assert gc.get_freeze_count() == frozen > 10_000
