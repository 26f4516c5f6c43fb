"""Workers on several machines of torchrun: how the machines connect, and how each of them can end."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

import numpy
import psutil
import pytest
from rlhf.errors import ConfigError, WorkerError
from rlhf.interfaces import ModelSpec, Place
from rlhf.types import RoleSpec
from rlhf_plugin_processes.channel import Channel, Message
from rlhf_plugin_processes.config import ProcessesConfig
from rlhf_plugin_processes.shared_values import SharedValue
from rlhf_plugin_processes.torchrun.environment import member
from rlhf_plugin_processes.torchrun.launcher import TorchrunLauncher
from rlhf_plugin_processes.torchrun.meeting import Meeting
from run_with_a_child import Parent
from torchrun_machines import Machines, MachinesLauncher

HERE = Path(__file__).parent


@pytest.fixture
def launcher():
    launcher = MachinesLauncher()
    yield launcher
    launcher.shutdown()


def test_torchrun_must_have_started_the_process():
    TorchrunLauncher.check(ProcessesConfig(), {"policy": Place()}, None, "auto")  # a run can be checked anywhere
    with pytest.raises(ConfigError, match="torchrun did not start this process"):
        TorchrunLauncher.join(ProcessesConfig())
    with pytest.raises(ConfigError, match="torchrun did not start this process"):
        TorchrunLauncher().place({"policy": Place()})


def test_values_over_tcp_keep_what_is_inside_them():
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname())
        other, _ = server.accept()
    large = numpy.arange(3_000_000)
    value = SharedValue.of({"inner": SharedValue.of(large), "text": "x" * 50_000})
    before = len(os.listdir("/proc/self/fd"))
    sender, receiver = Channel(one), Channel(other)
    thread = threading.Thread(target=sender.send, args=(Message(7, "ask", value),))
    thread.start()
    got = receiver.receive()
    thread.join()
    assert (got.call, got.kind) == (7, "ask")
    content = got.value.value()
    assert content["text"] == "x" * 50_000
    assert (content["inner"].value() == large).all()
    del got, content
    assert len(os.listdir("/proc/self/fd")) == before
    sender.close()
    assert receiver.receive() is None
    receiver.close()


def test_ranks_fill_one_machine_after_the_other(launcher):
    launcher.place({"policy": Place(3), "critic": Place(1)})
    assert launcher._placed.nodes == ["0", "0", "1", "1"]
    policy = launcher.launch_trainer(Parent, None, ModelSpec(RoleSpec("policy"), "", world_size=3))
    pids = [pid for pid, _ in policy.call("starts", [()] * 3)]
    [other] = launcher.machines.others
    mine = [os.getpid() in [p.pid for p in psutil.Process(pid).parents()[:3]] for pid in pids]  # the third
    assert mine == [True, True, False]
    assert other.pid in [p.pid for p in psutil.Process(pids[2]).parents()]
    launcher.shutdown()
    assert launcher.machines.codes() == [0]
    assert not any(map(psutil.pid_exists, pids))


def test_more_ranks_than_devices_are_refused_and_the_machines_end(launcher):
    match = r"(?s)does not fit on the machines of torchrun.*4 CPUs: this machine has 2, 127.0.0.1 has 2"
    with pytest.raises(ConfigError, match=match):
        launcher.place({"policy": Place(5)})
    assert launcher.machines.codes() == [0]


def test_one_process_of_each_machine_starts_workers():
    launcher = MachinesLauncher()
    launcher.machines = Machines(count=2, each=2)
    launcher.place({"policy": Place(4)})
    assert sorted(launcher._machines) == ["0", "1"]
    launcher.shutdown()
    assert launcher.machines.codes() == [0, 0, 0]


def test_a_start_of_torchrun_has_one_run(launcher):
    launcher.place({"policy": Place(2)})
    again = MachinesLauncher()
    again.machines = launcher.machines
    with pytest.raises(ConfigError, match="this start of torchrun has had a run"):
        again.place({"policy": Place(2)})


def test_a_machine_that_does_not_come_is_named(monkeypatch, caplog):
    monkeypatch.setattr("rlhf_plugin_processes.torchrun.meeting._SILENT_SECONDS", 0.05)
    machines = Machines(count=1)
    with machines.environment():
        meeting = Meeting(member(os.environ))
    with pytest.raises(WorkerError, match=r"process 1 of torchrun did not connect to the driver within 0.1 s"):
        meeting.take("process 1 of torchrun", 0.1)
    assert "process 1 of torchrun has not connected to the driver for 0.05 s. Look whether" in caplog.text
    meeting.close()


def test_a_connection_without_the_token_is_closed(launcher):
    def open_ports() -> set[int]:
        found = psutil.Process().net_connections("tcp")
        return {c.laddr.port for c in found if c.status == psutil.CONN_LISTEN}

    before = open_ports()
    launcher.place({"policy": Place(2)})
    [port] = open_ports() - before - {launcher.machines.port}
    wrong = b'{"token": "wrong", "name": "worker 0", "facts": {}}\n'
    for said in (b"{}\n", wrong, b"x" * 4096 + b"\n", b"[" * 4000 + b"\n", b"\xff\n", b"null\n"):
        with socket.create_connection(("127.0.0.1", port), timeout=10) as end:
            end.sendall(said)
            with suppress(ConnectionResetError):  # closed before the launcher had read all bytes
                assert end.recv(1) == b""


def test_a_killed_rank_of_another_machine_is_named(launcher):
    launcher.place({"policy": Place(3)})
    policy = launcher.launch_trainer(Parent, None, ModelSpec(RoleSpec("policy"), "", world_size=3))
    started = [psutil.Process(pid) for pids in policy.call("starts", [()] * 3) for pid in pids]
    policy.call("says", [("hello from a rank",)] * 3)
    waiting = policy.begin("fail_later", [(60.0,)] * 3)
    started[4].kill()
    cause = rf"(?s)policy rank 2 \(node 127.0.0.1, pid {started[4].pid}\) died during fail_later\(\): .*SIGKILL.*hello"
    with pytest.raises(WorkerError, match=cause):
        waiting()
    assert psutil.wait_procs(started[4:], timeout=60)[1] == []


def test_a_lost_machine_is_named_and_its_workers_end(launcher):
    launcher.place({"policy": Place(3)})
    policy = launcher.launch_trainer(Parent, None, ModelSpec(RoleSpec("policy"), "", world_size=3))
    started = [psutil.Process(pid) for pids in policy.call("starts", [()] * 3) for pid in pids]
    waiting = policy.begin("fail_later", [(60.0,)] * 3)
    launcher.machines.kill()
    with pytest.raises(WorkerError, match=r"policy rank 2 .* died during fail_later\(\): machine .* was lost"):
        waiting()
    assert psutil.wait_procs(started[4:], timeout=60)[1] == []


def test_a_worker_that_another_machine_cannot_start_is_named_with_the_reason(launcher):
    launcher.place({"policy": Place(3)})
    there = launcher._machines["1"]
    cause = r"policy rank 2 was not started: machine .* cannot start it: FileNotFoundError: .*'/proc/absent'"
    with pytest.raises(WorkerError, match=cause):
        there.start("policy rank 2", {}, None, Path("/proc/absent"), False)
    launcher.machines.kill()
    with pytest.raises(WorkerError, match=r"policy rank 2 was not started: machine .* was lost"):
        launcher.launch_trainer(Parent, None, ModelSpec(RoleSpec("policy"), "", world_size=3))


def test_both_time_limits_of_a_lost_machine_are_45_s(launcher):
    """tests/test_torchrun_runs.py cuts a network."""
    launcher.place({"policy": Place(2)})
    end = launcher._machines["1"]._connection._channel._end
    idle, between, count = (
        end.getsockopt(socket.IPPROTO_TCP, option)
        for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
    )
    assert end.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    assert idle + between * count == 45
    assert end.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 45_000


def test_no_worker_outlives_a_killed_driver():
    program = [sys.executable, str(HERE / "run_with_a_child.py"), "killed", "torchrun"]
    pipe = subprocess.PIPE
    run = subprocess.Popen(program, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
    started = [psutil.Process(pid) for pid in json.loads(run.stdout.readline())]
    started += psutil.Process(run.pid).children(recursive=True)
    run.kill()
    assert "the driver of the run (127.0.0.1) was lost" in run.communicate()[1]  # says the other machine
    assert psutil.wait_procs(started, timeout=60)[1] == []
