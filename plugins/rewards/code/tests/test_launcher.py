"""Failures of the sandbox are failed samples, and a sandbox that does not isolate is refused."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from groups import LIMITS, fenced, group
from pydantic import ValidationError
from rlhf.errors import ConfigError, RewardError
from rlhf.interfaces import RewardContext
from rlhf_plugin_code import sandboxes
from rlhf_plugin_code.interpreter import interpreter
from rlhf_plugin_code.reward import CodeReward
from rlhf_plugin_code.sandbox_launcher import SandboxLauncher
from rlhf_plugin_code.sandboxes import NAMES, probe
from rlhf_plugin_code.seccomp import seccomp_filter

from tests import orphans

NO_BWRAP = pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")


async def until(condition) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.005)


def programs(instance: SandboxLauncher) -> list[psutil.Process]:
    process = instance._process
    assert process is not None
    children = psutil.Process(process._process.pid).children(recursive=True)
    return [child for child in children if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]


@pytest.fixture
def fresh(launcher):
    instance = SandboxLauncher(launcher.sandbox, interpreter(None), LIMITS)
    yield instance
    instance.close()


def test_the_probe_finds_nothing_in_a_sandbox(launcher) -> None:
    assert asyncio.run(probe(launcher, LIMITS.memory)) == ()


def test_the_probe_finds_what_limits_allow(unisolated) -> None:
    names = asyncio.run(probe(unisolated, LIMITS.memory))
    assert names == ("read", "write", "create", "signal_outside")
    assert set(names) < set(NAMES)


@pytest.fixture
def no_bwrap(monkeypatch, tmp_path):
    """``no_bwrap(text)``: a shell script in place of bwrap."""

    def make(text: str) -> None:
        (tmp_path / "bwrap").write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / "bwrap").chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)

    return make


def test_a_sandbox_that_lets_programs_out_is_refused(no_bwrap) -> None:
    no_bwrap('while [ "$1" != --seccomp ]; do shift; done; shift 2; exec "$@"')
    with pytest.raises(
        ConfigError, match=r"'bwrap' allowed a program to do what it must prevent: read, write, .* Install"
    ):
        asyncio.run(CodeReward(CodeReward.Config(sandbox="bwrap")).setup(RewardContext()))


def test_a_sandbox_that_does_not_start_is_a_failed_sample(fresh, launcher) -> None:
    fresh._settings["command"] = ("/usr/bin/no-such-python",)
    with pytest.raises(RewardError, match=f"the sandbox '{launcher.sandbox}' did not start a program: .*"):
        asyncio.run(fresh.run("print(1)"))


@pytest.mark.parametrize("sandbox", [pytest.param("bwrap", marks=NO_BWRAP), "sandlock", "limits"])
def test_no_program_outlives_a_launcher_process_that_is_killed(sandbox: str) -> None:
    """Not even one that tries to unset the signal that the kernel sends, in a session of its own."""
    program = (
        "import ctypes, os, signal, sys, threading, time\n"
        "threading.Thread(target=time.sleep, args=(600,)).start()\n"
        "for try_ in (os.setsid, lambda: ctypes.CDLL(None).prctl(1, 0, 0, 0, 0)):\n"
        "    try: try_()\n    except OSError: pass\n"
        "for number in (signal.SIGTERM, signal.SIGHUP): signal.signal(number, signal.SIG_IGN)\n"
        "print('ready', file=sys.stderr, flush=True)\ntime.sleep(600)"
    )
    instance = SandboxLauncher(sandbox, interpreter(None), replace(LIMITS, wall_seconds=60.0))

    async def scenario() -> list[psutil.Process]:
        task = asyncio.create_task(instance.run(program))
        await until(lambda: instance._process is not None and any(p.num_threads() > 1 for p in programs(instance)))
        await asyncio.sleep(0.2)  # until after the calls that follow the thread
        left = programs(instance)
        os.kill(instance._process._process.pid, signal.SIGKILL)
        with pytest.raises(RewardError):
            await task
        await until(lambda: not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in left))
        return left

    try:
        assert asyncio.run(scenario())
    finally:
        instance.close()


DRIVER = """
import asyncio, sys
from dataclasses import replace
from groups import LIMITS
from rlhf_plugin_code.interpreter import interpreter
from rlhf_plugin_code.sandbox_launcher import SandboxLauncher
asyncio.run(SandboxLauncher(sys.argv[1], interpreter(None), replace(LIMITS, wall_seconds=600.0)).run(sys.argv[2]))
"""


@pytest.mark.parametrize("sandbox", [pytest.param("bwrap", marks=NO_BWRAP), "sandlock", "limits"])
def test_nothing_outlives_a_driver_that_is_killed_in_mid_call(sandbox: str, tmp_path: Path) -> None:
    program = "import threading, time\nthreading.Thread(target=time.sleep, args=(600,)).start()\ntime.sleep(600)"
    command = [sys.executable, "-c", DRIVER, sandbox, program]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent), "TMPDIR": str(tmp_path)}
    driver = subprocess.Popen(command, env=environment)
    try:
        while not any(p.num_threads() > 1 for p in psutil.Process(driver.pid).children(recursive=True)[1:]):
            assert driver.poll() is None
            time.sleep(0.01)
        family = psutil.Process(driver.pid).children(recursive=True)
    finally:
        driver.kill()
        driver.wait()
    assert orphans.end(family)
    assert [*tmp_path.iterdir()] == []


def test_a_launcher_process_that_dies_fails_its_samples_and_is_started_again(fresh) -> None:
    async def scenario() -> None:
        lost = asyncio.create_task(fresh.run("import time\ntime.sleep(600)"))
        await until(lambda: fresh._process is not None and programs(fresh))
        left = programs(fresh)
        os.kill(fresh._process._process.pid, signal.SIGKILL)
        with pytest.raises(RewardError, match="the process that starts programs has ended"):
            await lost
        await until(lambda: not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in left))
        assert (await fresh.run("print(1)")).out == "1\n"

    asyncio.run(scenario())


def test_a_cancelled_call_kills_its_program(fresh) -> None:
    async def scenario() -> None:
        assert (await fresh.run("print(1)")).out == "1\n"
        cancelled = asyncio.create_task(fresh.run("import time\ntime.sleep(600)"))
        await until(lambda: programs(fresh))
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        await until(lambda: not programs(fresh))

    asyncio.run(scenario())


def test_programs_run_at_the_same_time(fresh) -> None:
    """Each of the programs is alive until all of them are."""

    async def scenario() -> None:
        running = [asyncio.create_task(fresh.run("import time\ntime.sleep(600)")) for _ in range(4)]
        per_program = 2 if fresh.sandbox == "bwrap" else 1  # bwrap has a process of its own
        await until(lambda: fresh._process is not None and len(programs(fresh)) >= 4 * per_program)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    asyncio.run(scenario())


def test_what_is_not_installed_is_named_before_the_run(monkeypatch) -> None:
    monkeypatch.setattr(sandboxes.shutil, "which", lambda name: None)
    assert sandboxes.candidates("auto") == ["sandlock"]
    with pytest.raises(
        ConfigError, match=r"sandbox = 'bwrap', but bwrap is not installed. .*apt-get install bubblewrap"
    ):
        CodeReward(CodeReward.Config(sandbox="bwrap"))
    monkeypatch.setattr(sandboxes, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"bwrap and sandlock is not installed. .*pip install sandlock"):
        CodeReward(CodeReward.Config())
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(ConfigError, match=r"this system is darwin. Train in a virtual machine or container with Linux"):
        CodeReward(CodeReward.Config())


def test_auto_takes_the_next_sandbox_where_one_does_not_work(no_bwrap) -> None:
    no_bwrap("echo 'bwrap: No permissions to create a new namespace' >&2; exit 1")
    reward = CodeReward(CodeReward.Config(cpu_seconds=1))
    asyncio.run(reward.setup(RewardContext()))
    assert reward._launcher.sandbox == "sandlock"
    with pytest.raises(
        ConfigError, match=r"no sandbox works on this machine.*No permissions to create a new namespace"
    ):
        asyncio.run(CodeReward(CodeReward.Config(sandbox="bwrap")).setup(RewardContext()))


def test_limits_are_never_chosen_and_warn(caplog) -> None:
    assert "limits" not in sandboxes.candidates("auto")
    asyncio.run(CodeReward(CodeReward.Config(sandbox="limits")).setup(RewardContext()))
    assert "does not isolate" in caplog.text


@pytest.mark.parametrize(
    "options", [{"sandbox": "docker"}, {"cpu_seconds": 0}, {"memory_mib": 1}, {"wall_seconds": "9"}]
)
def test_wrong_options(options) -> None:
    with pytest.raises(ValidationError):
        CodeReward.Config(**options)


@pytest.mark.parametrize(
    ("python", "message"), [("python3", "not an absolute path"), ("/bin/true", "does not run Python")]
)
def test_an_interpreter_that_is_none(python: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        CodeReward(CodeReward.Config(interpreter=python))


def test_packages_of_another_interpreter(launcher) -> None:
    program = "try:\n    import pluggy\nexcept ImportError:\n    print('none')\nelse:\n    print('imported')"
    other = SandboxLauncher(launcher.sandbox, interpreter(sys.executable), LIMITS)
    try:
        assert asyncio.run(other.run(program)).out == "imported\n"
    finally:
        other.close()
    assert asyncio.run(launcher.run(program)).out == "none\n"


def test_a_score_before_setup_is_refused() -> None:
    with pytest.raises(RewardError, match="before setup"):
        asyncio.run(CodeReward().score(group([{"input": "", "output": ""}], fenced("1"))))


def test_the_filter_needs_a_known_machine() -> None:
    assert len(seccomp_filter("aarch64")) % 8 == 0
    with pytest.raises(ValueError, match="no system call filter for riscv64"):
        seccomp_filter("riscv64")


AS_NOBODY = """
import asyncio
from rlhf_plugin_code.interpreter import interpreter
from rlhf_plugin_code.sandbox_launcher import SandboxLauncher
from rlhf_plugin_code.limits import ProgramLimits
from rlhf_plugin_code.sandboxes import probe
limits = ProgramLimits(5, 30.0, 2**28, 2**20, 2**20)
launcher = SandboxLauncher({sandbox!r}, interpreter(None), limits)
print(asyncio.run(probe(launcher, limits.memory)))
ended = asyncio.run(launcher.run({threads!r}))
print(ended.end, ended.out)
launcher.close()
"""
THREADS = """
import os, threading, time
threading.stack_size(32768)
n = 0
try:
    while n < 100:
        threading.Thread(target=time.sleep, args=(9,)).start()
        n += 1
except RuntimeError:
    pass
os.write(1, b"%d" % n)
time.sleep(n >= 100)
os._exit(0)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="the other tests are run without root")
def test_without_root(launcher) -> None:
    python = f"/usr/bin/python3.{sys.version_info[1]}"
    if shutil.which(python) is None:
        pytest.skip(f"needs an interpreter that every user can read, such as {python}")
    command = [python, "-c", AS_NOBODY.format(sandbox=launcher.sandbox, threads=THREADS)]
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run(
        command, env=environment, user=65534, group=65534, extra_groups=[], capture_output=True, text=True, cwd="/"
    )
    if "ModuleNotFoundError" in done.stderr or "PermissionError" in done.stderr:
        pytest.skip("needs folders of packages that every user can read")
    names, end, *threads = done.stdout.split()
    assert names == "()", done.stderr
    assert (end == "exit" and int(threads[0]) < 64) if launcher.sandbox == "bwrap" else end == "threads"
