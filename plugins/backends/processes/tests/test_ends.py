"""However the driver or a worker ends, no process is left, and the cause is said."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from rlhf.errors import WorkerError
from rlhf.interfaces import ModelSpec, Place
from rlhf.types import RoleSpec
from rlhf_plugin_processes.launcher import OutputPrinter, ProcessesConfig, ProcessesLauncher, open_log
from run_with_a_child import Parent

from tests import orphans

FOLDER = Path(__file__).parent


@pytest.mark.parametrize(
    ("mode", "code"),
    [
        ("killed", -signal.SIGKILL),
        *(
            pytest.param(mode, code, marks=pytest.mark.full)
            for mode, code in (("ends", 0), ("raises", 1), ("forgets", 3))
        ),
    ],
)
def test_no_process_outlives_the_driver(mode, code):
    command = [sys.executable, str(FOLDER / "run_with_a_child.py"), mode]
    run = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    started = [psutil.Process(pid) for pid in json.loads(run.stdout.readline())]
    started += psutil.Process(run.pid).children()  # the supervisor
    started.append(started[0].parent())  # the guard of the worker
    assert len(started) == 4
    if mode == "killed":
        run.kill()
    run.communicate("\n")
    assert run.returncode == code
    assert psutil.wait_procs(started, timeout=60)[1] == []


def test_nothing_outlives_a_driver_that_is_killed_in_mid_call(tmp_path):
    pids = tmp_path / "pids"
    command = [sys.executable, str(FOLDER / "run_with_a_child.py"), orphans.leaving(pids)]
    assert orphans.end_with(subprocess.Popen(command), pids)


@pytest.fixture
def pair():
    launcher = ProcessesLauncher()
    launcher.place({"policy": Place(2)})
    yield launcher.launch_trainer(Parent, None, ModelSpec(RoleSpec("policy"), "", world_size=2))
    launcher.shutdown()


@pytest.mark.linux("elsewhere a child has no guard")
def test_a_stop_of_all_processes_of_a_job_leaves_the_ranks_to_the_driver(pair):
    """`scancel` sends SIGTERM to the driver and to all its descendants. The driver then finishes its step."""
    rank = psutil.Process(pair.call("starts", [()] * 2)[0][0])
    for process in (rank, rank.parent()):
        process.terminate()
    with pytest.raises(psutil.TimeoutExpired):  # the guard ends its worker within half a second
        rank.wait(timeout=1.5)
    assert pair.call("world_size", [()] * 2) == [2, 2]


def test_a_killed_rank_is_named_and_its_children_end(pair):
    started = [psutil.Process(pid) for pids in pair.call("starts", [()] * 2) for pid in pids]
    waiting = pair.begin("fail_later", [(60.0,)] * 2)
    os.kill(started[2].pid, signal.SIGKILL)
    cause = rf"policy rank 1 \(node 127.0.0.1, pid {started[2].pid}\) died during fail_later\(\): .* killed by SIGKILL"
    with pytest.raises(WorkerError, match=cause):
        waiting()
    assert psutil.wait_procs(started[2:], timeout=60)[1] == []
    with pytest.raises(WorkerError, match=r"can no longer be called: .*policy rank 1 .* died"):
        pair.call("world_size", [()] * 2)
    assert started[0].is_running()
    pair.shutdown()
    assert psutil.wait_procs(started, timeout=60)[1] == []


@pytest.mark.full
def test_a_worker_ends_with_a_killed_guard(pair):
    started = [psutil.Process(pid) for pid in (pair.call("starts", [()] * 2)[0])]
    started[0].parent().kill()
    assert psutil.wait_procs(started[:1], timeout=60)[1] == []
    with pytest.raises(WorkerError, match=r"policy rank 0 .* died during world_size\(\)"):
        pair.call("world_size", [()] * 2)
    started[1].kill()


@pytest.mark.full
def test_another_exit_is_said(pair):
    with pytest.raises(WorkerError, match=r"policy rank \d .* ended with exit code 7"):
        pair.call("leaves", [(7,)] * 2)


def test_the_output_of_a_start_that_fails_is_in_the_message(tmp_path):
    launcher = ProcessesLauncher(ProcessesConfig(env={"PYTHONPATH": str(tmp_path)}))
    (tmp_path / "cloudpickle.py").write_text("raise ImportError('a broken package')\n")
    launcher.place({"policy": Place()})
    with pytest.raises(WorkerError, match=r"(?s)policy rank 0 .*exit code 1\n.*standard error.*a broken package"):
        launcher.launch_trainer(Parent, None, ModelSpec(RoleSpec("policy"), ""))


def test_output_is_shown_with_names_and_kept(tmp_path, capsys):
    launcher = ProcessesLauncher(ProcessesConfig(show_output=True))
    launcher.place({"policy": Place()}, reports=tmp_path)
    policy = launcher.launch_trainer(Parent, None, ModelSpec(RoleSpec("policy"), ""))
    policy.call("says", [("hello from a worker",)])
    launcher.shutdown()
    assert "(policy rank 0) hello from a worker\n" in capsys.readouterr().out
    assert "hello from a worker" in (tmp_path / "workers" / "policy-0.log").read_text()


def test_the_output_of_a_replaced_engine_is_shown_once(tmp_path, capsys):
    printer = OutputPrinter()
    for number in range(2):
        log, path = open_log(tmp_path, "engine 0")
        printer.add("engine 0", path)
        os.write(log.number, b"start %d\n" % number)
    printer.close()
    assert capsys.readouterr().out == "(engine 0) start 0\n(engine 0) start 1\n"
