"""The next engine removes what a killed engine left in the temporary folder and in shared memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import pytest
from rlhf_plugin_vllm.engine.temporary_files import OWNER, SHARED_MEMORY, SOCKETS, TemporaryFiles, sweep

ENGINE = """
import os, signal, sys
from multiprocessing import resource_tracker
from multiprocessing.shared_memory import SharedMemory
from rlhf_plugin_vllm.engine.temporary_files import SHARED_MEMORY, TemporaryFiles

scratch = TemporaryFiles(shared=False)
segment = SharedMemory(create=True, size=4096)
resource_tracker.unregister(segment._name, "shared_memory")  # Python's own cleaner is killed with it on a cluster
scratch._segments.append(segment.name)
scratch._write_owner_file()
(SHARED_MEMORY / f"{scratch.meeting}_sums").touch()
print(scratch.folder, scratch.meeting, segment.name, flush=True)
sys.stdin.readline()
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_next_engine_removes_the_files_of_a_killed_one(tmp_path, monkeypatch):
    monkeypatch.setenv(SOCKETS, str(tmp_path))
    (tmp_path / "rlhf-vllm-being-made").mkdir()
    process = subprocess.Popen([sys.executable, "-c", ENGINE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    folder, meeting, segment = process.stdout.readline().split()
    first = TemporaryFiles(shared=False)
    sums = SHARED_MEMORY / f"{meeting}_sums"
    assert (Path(folder) / OWNER).exists(), "its owner lives"
    assert sums.exists()
    SharedMemory(segment).close()
    process.communicate("die\n")
    assert Path(folder).exists()
    assert (SHARED_MEMORY / segment).exists(), "no engine has started since"
    second = TemporaryFiles(shared=False)
    assert not Path(folder).exists()
    assert not sums.exists()
    assert not (SHARED_MEMORY / segment).exists()
    assert first.folder.exists()
    assert (tmp_path / "rlhf-vllm-being-made").exists()
    first.remove()
    second.remove()
    assert [p.name for p in tmp_path.iterdir()] == ["rlhf-vllm-being-made"]


def test_files_of_another_user_are_not_touched(tmp_path, monkeypatch):
    left = tmp_path / "rlhf-vllm-theirs"
    left.mkdir()
    (left / OWNER).write_text(json.dumps({"meeting": f"vllm_dist_{'0' * 32}", "segments": []}))
    uid = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: uid + 1)
    sweep(tmp_path)
    assert left.exists()
    monkeypatch.undo()
    sweep(tmp_path)
    assert not left.exists()


@pytest.mark.parametrize("meeting", ["../../mine", "", "*"])
def test_only_files_with_the_name_pattern_are_removed(tmp_path, monkeypatch, meeting):
    """A folder's file may name only files that an engine can have made; others are not removed."""
    monkeypatch.setattr("rlhf_plugin_vllm.engine.temporary_files.SHARED_MEMORY", tmp_path / "shm" / "mine")
    (tmp_path / "shm" / "mine").mkdir(parents=True)
    paths = [tmp_path / "mine", tmp_path / "shm" / "mine" / "sums"]
    for path in paths:
        path.write_text("")
    left = tmp_path / "rlhf-vllm-left"
    left.mkdir()
    (left / OWNER).write_text(json.dumps({"meeting": meeting, "segments": []}))
    sweep(tmp_path)
    assert not left.exists()
    assert all(path.exists() for path in paths)
