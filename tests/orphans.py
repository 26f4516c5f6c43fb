"""The test of every user of child processes: nothing outlives a driver that is killed, or a child that is."""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Iterable
from pathlib import Path

import psutil

_LEAVES = """
import os, signal, time
child = os.fork()
if child:
    os.waitpid(child, 0)
    while not (os.path.exists(PIDS) and open(PIDS).read().endswith("\\n")):
        time.sleep(0.01)
else:
    os.setsid()
    if os.fork():
        os._exit(0)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    with open(PIDS, "a") as file:
        file.write(f"{os.getpid()}\\n")
    os.execve("/bin/sleep", ["sleep", "600"], {})
"""


def leaving(pids: Path) -> str:
    """A statement of Python, on one line. It starts a process that nothing of its parents finds: in a session of its
    own, without their environment, a child of nobody. The statement ends when its pid is a line of the file."""
    return f"exec({_LEAVES!r}, {{'PIDS': {str(pids)!r}}})"


def left(pids: Path, driver: subprocess.Popen[str] | subprocess.Popen[bytes] | None = None) -> list[psutil.Process]:
    """The first process that :func:`leaving` started, when it runs. Empty if it has ended.

    Args:
        driver: it must live until then.
    """
    last = time.monotonic() + 120
    while not (pids.exists() and pids.read_text().endswith("\n")):
        assert time.monotonic() < last
        assert driver is None or driver.poll() is None, driver.returncode
        time.sleep(0.01)
    with contextlib.suppress(psutil.NoSuchProcess):
        return [psutil.Process(int(pids.read_text().split()[0]))]
    return []


def end(processes: Iterable[psutil.Process], seconds: float = 20.0) -> bool:
    """Whether all processes end by themselves. Those that do not are killed."""
    last = time.monotonic() + seconds
    while living := [process for process in processes if _lives(process)]:
        if time.monotonic() > last:
            for process in living:
                process.kill()
            return False
        time.sleep(0.01)
    return True


def end_with(driver: subprocess.Popen[str] | subprocess.Popen[bytes], pids: Path) -> bool:
    """Kill the driver when its child, in mid-call, has run :func:`leaving`. Whether all its descendants end."""
    try:
        orphans = left(pids, driver)
        family = psutil.Process(driver.pid).children(recursive=True)
        assert orphans[0].is_running()
        assert family
    finally:
        driver.kill()
        driver.communicate()
    return end([*family, *orphans])


def _lives(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False
