"""Worker processes: real kills, real deaths, nothing left behind."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from functools import partial
from typing import Any

import psutil
import pytest
from rlhf.errors import EnvError, RewardError
from rlhf.plugins import Resolved
from rlhf.types import RewardResult, Row
from rlhf_runtime.calls import plugin_worker
from rlhf_runtime.calls.plugin_worker import PluginWorker, WorkerPool
from rlhf_runtime.config.sections import EnvSection
from rlhf_runtime.rewards.scoring import ActiveReward
from rlhf_runtime.samples.episodes import Episodes

from tests import orphans
from tests.support.scoring import score

REWARD = """
import os, sys, time, ctypes, subprocess, threading
from rlhf.interfaces import Reward
from rlhf.types import RewardResult

class Act(Reward):
    def score(self, group):
        action = group.row["act"]
        if action == "print":
            print("hello from the plugin")
            os.write(1, b"raw bytes\\n")
        elif action == "loop":
            while True: pass
        elif action == "exit":
            print("cannot go on")
            os._exit(3)
        elif action == "segfault":
            threading.Thread(target=time.sleep, args=(9,), daemon=True).start()
            ctypes.string_at(0)
        elif action == "killed":
            os.kill(os.getpid(), 9)
        elif action == "memory":
            raise MemoryError("no room")
        elif action == "child":
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
            open(group.row["pid"], "w").write(str(child.pid))
            time.sleep(600)
        info = {"pid": os.getpid(), "torch": "torch" in sys.modules, "order": list({str(n) for n in range(50)})}
        return [RewardResult(1.0, info=info) for t in group.trajectories]
"""


def gone(pid: int) -> bool:
    for _ in range(200):
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.02)
    return False


async def call(resolved: Resolved, group, deadline: float = 20.0) -> Any:
    worker = PluginWorker(resolved, None, RewardError)
    try:
        await worker.start()
        return await worker.call("score", group, deadline=deadline)
    finally:
        worker.kill()


def test_a_worker_imports_no_torch_and_what_it_prints_is_shown_not_parsed(from_file, make_group, capfd) -> None:
    results = asyncio.run(call(from_file("reward", REWARD), make_group("2", act="print")))
    assert results[0]["value"] == 1.0
    assert results[0]["info"]["torch"] is False
    assert gone(results[0]["info"]["pid"])
    assert results[0]["info"]["pid"] != os.getpid()
    output = capfd.readouterr().err
    assert "hello from the plugin" in output
    assert "raw bytes" in output
    assert "[reward 'reward_0' (file)]" in output


@pytest.mark.parametrize(
    ("act", "message"),
    [
        ("exit", r"worker process exited with code 3 during score\(\). Its last output:\n  cannot go on"),
        ("segfault", r"(?s)worker process was killed by SIGSEGV during score\(\).*Segmentation fault"),
        ("killed", r"process was killed by SIGKILL \(as the system does when memory runs out\) during score\(\)"),
        ("memory", r"score\(\) raised MemoryError: no room \(.*reward_0.py:\d+\)"),
    ],
)
def test_the_error_for_a_death_or_an_exception_names_its_first_cause(
    from_file, make_group, act: str, message: str
) -> None:
    with pytest.raises(RewardError, match=message):
        asyncio.run(call(from_file("reward", REWARD), make_group("2", act=act)))


def test_a_kill_reaches_what_the_plugin_has_started(from_file, make_group, tmp_path) -> None:
    pid_file = tmp_path / "child.pid"
    with pytest.raises(RewardError, match="deadline"):
        asyncio.run(call(from_file("reward", REWARD), make_group("2", act="child", pid=str(pid_file)), deadline=2.0))
    assert gone(int(pid_file.read_text()))


LEAVES = """
import re
def score(prompt, completion, row):
    {leaving}
    if row["act"] == "backtrack":
        re.match(r"(a+)+$", "a" * 64 + "b")  # one C call that never lets go of the interpreter
    return 1.0
"""
LINUX = pytest.mark.linux("elsewhere only the group of a worker is known")


@LINUX
def test_processes_that_a_worker_started_in_another_session_end_with_it(from_file, make_group, tmp_path) -> None:
    pids = tmp_path / "pids"
    resolved = from_file("reward", LEAVES.format(leaving=orphans.leaving(pids)))
    with pytest.raises(RewardError, match="deadline"):
        asyncio.run(call(resolved, make_group("2", act="backtrack"), deadline=2.0))
    assert orphans.end(orphans.left(pids))


def test_the_pool_replaces_a_dead_worker_and_serves_in_order(from_file, make_group) -> None:
    """A set of texts has one order in all workers: those of a group run an environment that may draw from it."""
    pool = WorkerPool(partial(PluginWorker, from_file("reward", REWARD), None, RewardError), size=1)
    order: list[int] = []

    async def use(number: int, act: str) -> dict[str, Any]:
        async with pool.worker() as worker:
            order.append(number)
            result = await worker.call("score", make_group("2", act=act), deadline=0.5 if act == "loop" else 20.0)
            return result[0]["info"]

    async def scenario() -> list[object]:
        return await asyncio.gather(
            use(0, "ok"), use(1, "loop"), use(2, "ok"), use(3, "exit"), use(4, "ok"), return_exceptions=True
        )

    try:
        *answers, last = asyncio.run(scenario())
    finally:
        pool.close()
    assert order == [0, 1, 2, 3, 4]
    assert re.search(r"score\(\) took longer than its deadline of 0.5 s; .* was killed", str(answers[1]))
    assert "exited with code 3" in str(answers[3])
    pids = {info["pid"] for info in (answers[0], answers[2], last)}
    assert len(pids) == 3
    assert all(map(gone, pids))
    assert answers[0]["order"] == answers[2]["order"] == last["order"]


STARTS = """
import os, time
from pathlib import Path

FOLDER = Path({folder!r})
(FOLDER / f"starts-{{os.getpid()}}").touch()
for _ in range(40):
    (FOLDER / f"seen-{{os.getpid()}}-{{len([*FOLDER.glob('starts-*')])}}").touch()
    time.sleep(0.01)
(FOLDER / f"starts-{{os.getpid()}}").unlink()

def score(prompt, completion, row):
    return 1.0
"""


def test_only_some_workers_start_at_the_same_time(from_file, tmp_path, monkeypatch) -> None:
    """Each start has a deadline, and hundreds of them on few processors would exceed it."""
    monkeypatch.setattr(plugin_worker, "MOST_STARTS", 2)
    make = partial(PluginWorker, from_file("reward", STARTS.format(folder=str(tmp_path))), None, RewardError)
    pools = [WorkerPool(make, size=1) for _ in range(4)]

    async def scenario() -> list[PluginWorker]:
        return await asyncio.gather(*(pool.acquire() for pool in pools))

    try:
        assert all(worker.running for worker in asyncio.run(scenario()))
    finally:
        for pool in pools:
            pool.close()
    records = [path.name.split("-") for path in tmp_path.glob("seen-*")]
    assert len({int(process) for _, process, _ in records} - {os.getpid()}) == 4
    assert {int(count) for _, _, count in records} == {1, 2}


def test_a_worker_that_died_while_nobody_used_it_fails_no_call(from_file, make_group) -> None:
    """Killed from outside, for its memory say: the next call is served by another."""
    pool = WorkerPool(partial(PluginWorker, from_file("reward", REWARD), None, RewardError), size=1)

    async def pid() -> int:
        async with pool.worker() as worker:
            return (await worker.call("score", make_group("2", act="ok"), deadline=20.0))[0]["info"]["pid"]

    async def scenario() -> tuple[int, int, int]:
        first = await pid()
        os.kill(first, signal.SIGKILL)
        assert gone(first)
        return first, await pid(), await pid()

    try:
        first, second, third = asyncio.run(scenario())
    finally:
        pool.close()
    assert first != second == third
    assert gone(second)


@pytest.mark.linux("elsewhere a child has no guard")
def test_a_stop_of_all_processes_of_a_run_leaves_its_workers_to_it(from_file, make_group) -> None:
    """`ray job stop` sends SIGTERM to all descendants of the driver, which then finishes its step."""
    pool = WorkerPool(partial(PluginWorker, from_file("reward", REWARD), None, RewardError), size=1)

    async def pid() -> int:
        async with pool.worker() as worker:
            return (await worker.call("score", make_group("2", act="ok"), deadline=20.0))[0]["info"]["pid"]

    async def scenario() -> tuple[int, int]:
        first = await pid()
        worker = psutil.Process(first)
        parents = worker.parents()
        # those of this worker only, because other tests have child processes in this process too
        for process in [worker, *parents[: parents.index(psutil.Process())]]:
            process.send_signal(signal.SIGTERM)
        await asyncio.sleep(0.5)
        return first, await pid()

    try:
        first, second = asyncio.run(scenario())
    finally:
        pool.close()
    assert first == second
    assert gone(first)


def test_a_cancelled_call_kills_its_worker_and_frees_its_place(from_file, make_group) -> None:
    pool = WorkerPool(partial(PluginWorker, from_file("reward", REWARD), None, RewardError), size=1)

    async def use(act: str) -> float:
        async with pool.worker() as worker:
            return (await worker.call("score", make_group("2", act=act), deadline=20.0))[0]["value"]

    async def scenario() -> float:
        await use("ok")  # started
        hanging, waiting = asyncio.create_task(use("loop")), asyncio.create_task(use("loop"))
        await asyncio.sleep(0.1)
        waiting.cancel()
        hanging.cancel()
        await asyncio.gather(hanging, waiting, return_exceptions=True)
        return await use("ok")

    try:
        assert asyncio.run(asyncio.wait_for(scenario(), 20)) == 1.0
    finally:
        pool.close()


def test_a_class_of_this_process_only_is_copied_with_what_it_uses(make_group) -> None:
    from rlhf.interfaces import Reward

    class Local(Reward):
        name = "local"

        def score(self, group):
            return [RewardResult(float(gone(os.getpid() + 10**7)), info={"pid": os.getpid()})]

    resolved = Resolved("reward", "local", Local, "in process", "", "in process/local")
    results = asyncio.run(call(resolved, make_group("2")))
    assert results[0]["value"] == 1.0
    assert gone(results[0]["info"]["pid"])


def test_a_module_that_cannot_be_imported_there_is_said_at_the_start(from_file) -> None:
    text = "import sys\nassert 'plugin_process' not in str(sys.argv), 'only in workers'\n" + REWARD
    with pytest.raises(RewardError, match=r"starting raised PluginImportFailed.*only in workers"):
        asyncio.run(call(from_file("reward", text), None))


ANSWERS = """
import os, sys, time
from rlhf_runtime.calls.plugin_process import HEADER
from rlhf.interfaces import Env, Reward
from rlhf.types import EnvStep

def send(text):
    body = text.encode()
    os.write(int(sys.argv[1]), HEADER.pack(len(body)) + body)
    time.sleep(60)

class Answering(Reward):
    def score(self, group):
        if group.row["act"] == "huge":
            os.write(int(sys.argv[1]), HEADER.pack(1 << 60))
            time.sleep(60)
        if group.row["act"] == "fork" and os.fork() == 0:
            return []
        if group.row["act"] == "fork":
            os.wait()
            raise ValueError("this is the parent")
        send(group.row["act"])

class Speaking(Env):
    def reset(self, row, seed):
        self.row = row
        if row["at"] == "reset":
            send(row["act"])
        return ""

    def step(self, action):
        send(self.row["act"])
"""


@pytest.mark.parametrize(
    ("act", "message"),
    [
        ("[1.0]", r"worker process sent an invalid answer \(bytes b'\[1.0\]'\) and was killed during score\(\)"),
        ("1" * 5000, "sent an invalid answer"),
        ("[" * 100000, "sent an invalid answer"),
        ('{"answer": 1}', "sent an invalid answer"),
        ('{"reply": [], "raised": ""}', "sent an invalid answer"),
        ("huge", r"announced an answer of 1152921504606846976 bytes \(allowed: at most 1073741824\) and was killed"),
        ('{"reply": 1.0}', "received float 1.0 from its worker process; allowed: a list"),
        ('{"reply": []}', "returned 0 results for 1 trajectories"),
        ('{"reply": [{"value": 1.0, "more": 2}]}', "allowed: value, score, steps and info"),
        ('{"reply": [{"value": NaN}]}', r"RewardResult\(value=nan\)"),
        ("fork", "raised ValueError: this is the parent"),
    ],
    ids=lambda text: text[:30],
)
def test_the_answer_of_a_worker_is_checked_on_arrival(from_file, make_group, act: str, message: str) -> None:
    resolved, group = from_file("reward", ANSWERS), make_group("2", act=act)
    score([ActiveReward("r", resolved, resolved.cls(None), deadline=20.0)], group, workers=1)
    (trajectory,) = group.trajectories
    assert trajectory.status == "failed"
    assert re.match("RewardError: reward 'r' ", trajectory.error)
    assert re.search(message, trajectory.error)


@pytest.mark.parametrize(
    ("method", "act", "message"),
    [
        ("reset", '{"reply": 3}', r'reset\(\) returned int 3; allowed: text, "" for nothing'),
        ("step", '{"reply": [1]}', r"step\(\) received list \[1\] from its worker process; allowed: observation"),
        ("step", '{"reply": {"gain": 1}}', "allowed: observation, reward, done, sampling, info"),
        ("step", '{"reply": {"done": 1}}', r"EnvStep\(done=int 1\)"),
        ("step", '{"reply": {"sampling": [1]}}', "received dict {'sampling'"),
    ],
)
def test_what_an_environments_worker_answers_is_checked(from_file, method: str, act: str, message: str) -> None:
    async def scenario() -> None:
        episodes = Episodes(from_file("env", ANSWERS), None, EnvSection(use="x", deadline=20.0))
        try:
            episode = episodes.open()
            await episode.reset(Row({"at": method, "act": act}, "unit", 0), 0)
            await episode.step("go")
        finally:
            episodes.close()

    with pytest.raises(EnvError, match=message):
        asyncio.run(scenario())


DRIVER = """
import asyncio, sys
from rlhf_runtime.calls.plugin_worker import PluginWorker
from rlhf.errors import RewardError
from rlhf.plugins import Plugins
from rlhf.types import Group, Row, Trajectory, Turn
async def main():
    reward, python = sys.argv[1:]
    worker = PluginWorker(Plugins.discover().resolve("reward", reward), None, RewardError, python=python or None)
    await worker.start()
    row = Row({"prompt": "1+1=", "act": "backtrack"}, "s", 0)
    turns = [Turn([1], sampled=False, text="1+1="), Turn([2], sampled=True, text="2", finish="stop")]
    await worker.call("score", Group(row, 0, [Trajectory(row, turns, (0, 0))]), deadline=600)
asyncio.run(main())
"""


@LINUX
@pytest.mark.parametrize("python", ["", sys.executable], ids=["own", "another"])
def test_nothing_outlives_a_driver_that_is_killed(from_file, tmp_path, python: str) -> None:
    """Neither a worker that holds the interpreter's lock nor what it started in another session."""
    pids = tmp_path / "pids"
    reference = from_file("reward", LEAVES.format(leaving=orphans.leaving(pids))).ref
    assert orphans.end_with(subprocess.Popen([sys.executable, "-c", DRIVER, reference, python]), pids)
