"""Short waits of OpenMP threads: when they are on, and that they change no number."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest
import torch
from rlhf.interfaces import ModelSpec
from rlhf.types import RoleSpec
from rlhf_plugin_local import short_waits
from rlhf_plugin_local.launcher import LocalLauncher
from rlhf_plugin_local.short_waits import ShortWaits, applicable
from rlhf_plugin_local.trainer import TorchTrainer


@pytest.fixture
def cores(monkeypatch):
    """cores(n, threads): as if this process had n cores and torch that many threads, and the user chose nothing."""
    for name in short_waits.CHOSEN:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(short_waits.Path, "exists", lambda path: True)

    def machine(count, threads):
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(count)), raising=False)
        monkeypatch.setattr(torch, "get_num_threads", lambda: threads)

    return machine


@pytest.mark.parametrize(
    ("count", "threads", "expected"), [(2, 2, True), (2, 1, False), (4, 3, True), (4, 2, False), (8, 8, True)]
)
def test_a_second_team_is_used_where_it_exceeds_the_cores(cores, count, threads, expected):
    cores(count, threads)
    assert applicable() is expected


@pytest.mark.parametrize("name", short_waits.CHOSEN)
def test_what_the_user_chose_is_kept(cores, monkeypatch, name):
    cores(2, 2)
    monkeypatch.setenv(name, "0")
    assert not applicable()


def test_waits_are_short_only_while_threads_wait_for_cores():
    waits = ShortWaits()
    for share, short in [(0.0, False), (0.1, False), (0.2, True), (0.1, True), (0.01, False), (0.2, True)]:
        waits.decide(share)
        assert (waits.team is not None) is short, share
    waits.close()
    assert waits.team is None
    assert "second team" not in {t.name for t in threading.enumerate()}


def test_the_launcher_looks_while_it_has_a_trainer(cores, model_path):
    launcher = LocalLauncher()
    cores(2, 2)
    launcher.launch_trainer(TorchTrainer, None, ModelSpec(RoleSpec("reference"), str(model_path), "fp32"))
    assert "short waits" in {t.name for t in threading.enumerate()}
    launcher.shutdown()
    assert "short waits" not in {t.name for t in threading.enumerate()}


TEAM = """
import os, torch
from rlhf_plugin_local.short_waits import SecondTeam, without_a_core

def threads():
    return len(os.listdir("/proc/self/task"))

def numbers():
    torch.manual_seed(0)
    x = torch.randn(300, 700)
    return (x @ x.T).softmax(1).sum(0)

alone = numbers()
first, waited = threads(), without_a_core()
team = SecondTeam()
assert threads() == first + 2, "the thread that holds the team, and its one further member"
assert torch.equal(alone, numbers())
team.close()
assert torch.equal(alone, numbers())
assert without_a_core() >= 0
"""


@pytest.mark.linux("the threads of this process are counted in /proc")
def test_a_second_team_starts_and_changes_no_number():
    """In a process of its own: the tests themselves run with one thread."""
    environment = {k: v for k, v in os.environ.items() if k not in short_waits.CHOSEN} | {"OMP_NUM_THREADS": "2"}
    done = subprocess.run([sys.executable, "-c", TEAM], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
