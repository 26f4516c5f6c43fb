"""Child processes: what they get, how they end, and that nothing is left of them."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys

import psutil
import pytest
from rlhf.children import Child
from rlhf.supervisor import supervised

from tests import orphans

pytestmark = pytest.mark.linux("elsewhere a child is a direct child")


@pytest.fixture
def pipe():
    reader, writer = os.pipe()
    yield reader, writer
    os.close(reader)
    os.close(writer)


def python(text: str, stream: int, **options) -> Child:
    return Child([sys.executable, "-S", "-c", text], stdout=stream, stderr=stream, **options)


def test_a_child_gets_its_words_environment_folder_and_descriptors(pipe, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    reader, writer = pipe
    child_end, giving = os.pipe()
    os.write(giving, "grüße".encode())
    text = f"import os; print(os.read({child_end}, 99).decode(), os.environ['NAME'], os.getcwd(), os.getsid(0))"
    child = python(text, writer, env={"NAME": "täglich", "PYTHONUTF8": "1"}, pass_fds=(child_end,))
    for end in (child_end, giving):
        os.close(end)
    assert child.wait() == 0
    *words, session = os.read(reader, 999).decode().split()
    assert words == ["grüße", "täglich", str(tmp_path)]
    assert int(session) != os.getsid(0)


@pytest.mark.parametrize(
    ("text", "code"),
    [("raise SystemExit(3)", 3), ("import os; os.kill(os.getpid(), 11)", -11), ("import os; os.kill(0, 9)", -9)],
)
def test_how_a_child_ended(pipe, text: str, code: int) -> None:
    child = python(text, pipe[1])
    assert child.wait() == child.returncode == code
    child.end()


def test_a_program_that_cannot_be_started_is_said(pipe) -> None:
    assert Child(["no-such-program"], stdout=pipe[1], stderr=pipe[1]).wait() == 127
    assert os.read(pipe[0], 999) == b"'no-such-program' cannot be started: No such file or directory\n"


@pytest.mark.parametrize("event", ["exits", "is ended", "is forgotten"])
def test_what_a_child_started_ends_with_it(pipe, tmp_path, event: str) -> None:
    pids = tmp_path / "pids"
    child = python(orphans.leaving(pids) + ("" if event == "exits" else "\nimport time; time.sleep(600)"), pipe[1])
    processes = orphans.left(pids)
    if event == "is ended":
        assert child.returncode is None
        assert not child.ends_within(0.01)
        child.end()
        assert child.wait() == -signal.SIGKILL
        assert not processes or not processes[0].is_running()
    elif event == "is forgotten":
        del child
    assert orphans.end(processes)


def test_several_coroutines_wait_for_a_child(pipe) -> None:
    async def scenario() -> list[int]:
        child = python("import time; time.sleep(600)", pipe[1])
        asyncio.get_running_loop().call_later(0.1, child.end)
        return [*await asyncio.gather(child.wait_async(), child.wait_async()), await child.wait_async()]

    assert asyncio.run(scenario()) == [-signal.SIGKILL] * 3


DRIVER = """
import os, sys, time
from rlhf.children import Child
Child(["true"], stdout=1, stderr=2).wait()
if sys.argv[2] == "fork" and os.fork():  # the fork has no supervisor yet
    time.sleep(600)
kept = Child([sys.executable, "-S", "-c", sys.argv[1] + "\\nimport time; time.sleep(600)"], stdout=1, stderr=2)
time.sleep(600)
"""


@pytest.mark.parametrize("killed", ["driver", "fork", "supervisor"])
def test_nothing_outlives_a_driver_or_a_supervisor_that_is_killed(tmp_path, killed: str) -> None:
    pids = tmp_path / "pids"
    driver = subprocess.Popen([sys.executable, "-c", DRIVER, orphans.leaving(pids), killed])
    if killed == "driver":
        assert orphans.end_with(driver, pids)
        return
    processes = orphans.left(pids, driver)
    process = psutil.Process(driver.pid)
    [victim] = [c for c in process.children() if ("supervisor.py" in str(c.cmdline())) == (killed == "supervisor")]
    family = [*victim.children(recursive=True), *processes]
    victim.kill()
    success = orphans.end(family)
    driver.kill()
    driver.wait()
    assert success


def test_a_guard_by_its_command_line_exits_as_its_worker_did_and_ends_what_that_started(tmp_path) -> None:
    pids = tmp_path / "pids"
    statement = f"{orphans.leaving(pids)}\nimport os; os.kill(os.getpid(), 11)"
    assert subprocess.run(supervised([sys.executable, "-S", "-c", statement]), check=False).returncode == -11
    assert not orphans.left(pids)


IGNORES = """
import os, signal, subprocess, sys, time
from rlhf.supervisor import ignore_stops
ignore_stops()
os.kill(os.getpid(), signal.SIGTERM)
fork = os.fork()
if fork == 0:
    time.sleep(600)
program = subprocess.Popen(["sleep", "600"])
os.kill(fork, signal.SIGTERM)
program.terminate()
print(os.waitstatus_to_exitcode(os.waitpid(fork, 0)[1]), program.wait())
"""


def test_a_worker_ignores_stops_and_what_it_starts_does_not() -> None:
    done = subprocess.run([sys.executable, "-c", IGNORES], capture_output=True, text=True, check=False, timeout=60)
    assert (done.stdout, done.returncode) == ("-15 -15\n", 0), done.stderr
