"""Tests for each launcher: stalled workers are found by heartbeats, reported with their stacks, and end the run."""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import suppress

import pytest
from rlhf.errors import WorkerError
from rlhf.interfaces import GENERATOR, GeneratorSpec, ModelSpec, Place
from rlhf.types import GenerationRequest, RoleSpec, Sampling
from rlhf_workers.driver.node_tools import inspect_process
from worker_standins import OddConfig, OddGenerator, OddTrainer

pytestmark = [pytest.mark.slow, pytest.mark.full]


@pytest.fixture
def watched(launch, tmp_path):
    """Two ranks, a heartbeat of 0.4 s. A rank is stalled after 4 s without a response or 3 s without progress."""
    launcher = launch(heartbeat=0.4, stall_timeout=3.0)
    launcher.place({"policy": Place(2), GENERATOR: Place(2)}, reports=tmp_path)
    return launcher


@pytest.fixture
def pair(watched):
    return watched.launch_trainer(OddTrainer, None, ModelSpec(RoleSpec("policy", trained=True), "", world_size=2))


def test_a_worker_that_sleeps_in_python_is_reported_with_its_stack(pair, tmp_path):
    start = time.monotonic()
    with pytest.raises(WorkerError) as info:
        pair.call("raises_on", [(5, 60.0)] * 2)  # there is no rank 5: both sleep
    assert 3 <= time.monotonic() - start < 50
    page = tmp_path / "stall-policy-0.txt"
    assert str(page) in str(info.value)
    assert "policy rank 0 (node 127.0.0.1, pid" in str(info.value)
    assert "has made no progress for" in str(info.value)
    text = page.read_text()
    assert "time.sleep(others)" in text
    assert "launcher.stall_timeout" in text
    assert "======== policy rank 1 (node 127.0.0.1" in text, "the other pending worker"
    assert text.count("in raises_on() for") == 2
    with pytest.raises(WorkerError, match=r"can no longer be called: policy rank 0 .* has made no progress"):
        pair.call("world_size", [()] * 2)


def test_a_stopped_worker_is_reported_before_the_stall_timeout(launch, tmp_path):
    """A process that does not respond at all is stalled after ten heartbeats."""
    launcher = launch(heartbeat=0.3, stall_timeout=600.0, reports=str(tmp_path))
    launcher.place({"policy": Place(2)})
    pair = launcher.launch_trainer(OddTrainer, None, ModelSpec(RoleSpec("policy", trained=True), "", world_size=2))
    pid = pair.members[1].facts["pid"]
    os.kill(pid, signal.SIGSTOP)
    try:
        with pytest.raises(WorkerError) as info:
            pair.call("sleeps", [(0.1,)] * 2)
    finally:
        os.kill(pid, signal.SIGCONT)
    assert f"policy rank 1 (node 127.0.0.1, pid {pid}) has not responded for" in str(info.value)
    text = (tmp_path / "stall-policy-1.txt").read_text()
    assert "State: T (stopped)" in text
    assert "find out on its node what stopped it" in text
    assert "MainThread" in text, "py-spy reads the stacks of a stopped process"
    assert "policy rank 0" not in text, "it had answered"


def test_a_stopped_rank_is_named_while_the_first_rank_streams(launch, tmp_path):
    launcher = launch(heartbeat=0.3, stall_timeout=600.0, reports=str(tmp_path))
    launcher.place({"policy": Place(2)})
    pair = launcher.launch_trainer(OddTrainer, None, ModelSpec(RoleSpec("policy", trained=True), "", world_size=2))
    pid = pair.members[1].facts["pid"]
    items = pair.stream("arrays", 2, 10, 15.0)
    next(items)
    os.kill(pid, signal.SIGSTOP)
    try:
        with pytest.raises(WorkerError, match=r"policy rank 1 .* has not responded for \d+ s in policy.arrays\(\)"):
            list(items)
    finally:
        os.kill(pid, signal.SIGCONT)
    assert "======== policy rank 0" in (tmp_path / "stall-policy-1.txt").read_text(), "its item was still awaited"


def test_an_engine_stopped_while_it_samples_is_reported(watched, tmp_path):
    engines = watched.launch_generator(OddGenerator, OddConfig(seconds=0.3), GeneratorSpec((0,), str))
    pid = engines.pool.members[0].facts["pid"]
    queries = [GenerationRequest((n, 1), n, Sampling(8)) for n in range(40)]  # 6 s without the stop
    threading.Timer(0.5, os.kill, (pid, signal.SIGSTOP)).start()
    try:
        with pytest.raises(WorkerError, match=r"engine 0 .* for \d+ s in generate\(\)"):
            list(engines.generate(queries))
    finally:
        with suppress(ProcessLookupError):  # the launcher may have ended it
            os.kill(pid, signal.SIGCONT)
    assert "State: T (stopped)" in (tmp_path / "stall-engine-0.txt").read_text()


def test_a_stalled_engine_is_not_waited_for_twice(watched, tmp_path):
    """The run puts the engines to sleep after the stall, so that the roles on their devices can save a checkpoint."""
    config = OddConfig(seconds=0.3, folder=str(tmp_path))
    engines = watched.launch_generator(OddGenerator, config, GeneratorSpec((0,), str))
    pids = [engine.facts["pid"] for engine in engines.pool.members.values()]
    queries = [GenerationRequest((n, 1), n, Sampling(8)) for n in range(40)]
    threading.Timer(0.5, os.kill, (pids[0], signal.SIGSTOP)).start()
    with pytest.raises(WorkerError, match=r"engine 0 .* s in generate\(\)\. What each"):
        list(engines.generate(queries))
    engines.sleep()
    assert (tmp_path / "notes.txt").read_text().count("sleep") == 1, "only of the living engine"
    for _ in range(100):
        if inspect_process(pids[0]).startswith("State: gone"):
            break
        time.sleep(0.1)
    assert inspect_process(pids[0]).startswith("State: gone"), "the process was killed, so its memory is free"
    with pytest.raises(WorkerError, match=r"the engines can no longer be called: engine 0 .* in generate\(\)$"):
        list(engines.generate(queries))
    assert (tmp_path / "notes.txt").read_text().count("started") == 2, "a stalled engine is not replaced"


def test_samples_are_progress(watched):
    """The call takes longer than stall_timeout, and a sample finishes at least every 0.7 s."""
    engines = watched.launch_generator(OddGenerator, OddConfig(seconds=0.7), GeneratorSpec((0,), str))
    queries = [GenerationRequest((n, 1), n, Sampling(8)) for n in range(12)]
    assert len(list(engines.generate(queries))) == 12


def test_items_are_progress(pair):
    assert len(list(pair.stream("arrays", 7, 10, 0.6))) == 7, "3.6 s, an item every 0.6 s"
    with pytest.raises(WorkerError, match=r"no progress for \d+ s in policy.arrays\(\)"):
        list(pair.stream("arrays", 2, 10, 30.0))


def test_a_busy_worker_is_not_stalled(launch, tmp_path):
    """A thread that computes in Python still lets the heartbeat thread run, so only stall_timeout applies."""
    launcher = launch(heartbeat=0.3, stall_timeout=600.0, reports=str(tmp_path / "pages"))
    launcher.place({"policy": Place()})
    policy = launcher.launch_trainer(OddTrainer, None, ModelSpec(RoleSpec("policy", trained=True), ""))
    assert policy.call("spin", [(4.0,)]) == ["spun"], "more than ten heartbeats"
    assert [*(tmp_path / "pages").glob("stall-*")] == []


def test_a_start_that_exceeds_start_timeout_is_an_error(launch, tmp_path, monkeypatch):
    """The limit is shortened only after the process has started, which may take long on a busy machine."""
    launcher = launch()
    build = launcher._build

    def in_a_hurry(*arguments):
        launcher.config = launcher.config.model_copy(update={"start_timeout": 6.0})
        return build(*arguments)

    monkeypatch.setattr(launcher, "_build", in_a_hurry)
    launcher.place({"policy": Place(), GENERATOR: Place()}, reports=tmp_path)
    with pytest.raises(WorkerError, match=r"engine 0: not ready within 6 s \(launcher.start_timeout\)"):
        launcher.launch_generator(OddGenerator, OddConfig(slow_start=60.0), GeneratorSpec((0,), str))
    text = (tmp_path / "stall-engine-0.txt").read_text()
    assert "in start() for" in text
    assert "time.sleep(config.slow_start)" in text


def test_the_report_on_a_dead_process():
    assert inspect_process(2**22 + 1).startswith("State: gone")


def test_the_report_on_a_running_process():
    assert "(running)" in inspect_process(os.getpid()) or "sleeping" in inspect_process(os.getpid())
