"""The parent process of one worker: ends the worker and all its descendants when the driver is gone, or asks for it.

    python -I -S supervisor.py DRIVER_PID SOCKET COMMAND...

SOCKET is a descriptor for the worker alone; -1: there is none. In the driver, :func:`supervised` makes the command line
and :func:`end` asks for the end.

It uses the standard library only, so that it starts quickly and stays small. It exits as the worker did, with its exit
status or by its signal. Descendants whose parents ended become children of this process (PR_SET_CHILD_SUBREAPER), so
none can escape. If this process itself is killed, the worker is killed by the kernel (PR_SET_PDEATHSIG).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
LOOK_SECONDS = 0.5
"""Between two looks whether the driver lives."""


def supervised(command: Sequence[str], socket: int = -1) -> list[str]:
    """The command line that runs ``command`` under a supervisor. Start it in a new session. On other systems than Linux
    there is none."""
    if sys.platform != "linux":
        return list(command)
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), str(socket), *command]


def end(pid: int) -> None:
    """End the worker whose supervisor is ``pid``, and all its descendants. Does not wait for it."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if sys.platform == "linux":
            os.kill(pid, signal.SIGTERM)
        else:
            os.killpg(pid, signal.SIGKILL)


def main(driver: int, socket: int, command: list[str]) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    awaited = {signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, awaited)
    supervisor = os.getpid()
    worker = os.fork()
    if worker == 0:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != supervisor:  # it died before the line above
            os._exit(1)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        try:
            os.execvp(command[0], command)
        except OSError as error:
            os.write(2, f"{command[0]!r} cannot be started: {error.strerror}\n".encode())
            os._exit(127)
    if socket >= 0:
        os.close(socket)
    status = wait(driver, worker, awaited)
    end_descendants()
    if os.WIFSIGNALED(status):
        end_by(os.WTERMSIG(status))
    os._exit(os.WEXITSTATUS(status))


def wait(driver: int, worker: int, awaited: set[signal.Signals]) -> int:
    """The worker's wait status. It is killed when the driver is gone, or when this process gets a signal."""
    while True:
        got = signal.sigtimedwait(awaited, LOOK_SECONDS)
        if os.getppid() != driver or (got is not None and got.si_signo != signal.SIGCHLD):
            os.kill(worker, signal.SIGKILL)
            return os.waitpid(worker, 0)[1]
        pid, status = os.waitpid(worker, os.WNOHANG)
        if pid:
            return status


def end_descendants() -> None:
    """Kill every descendant, and wait until all are gone."""
    while True:
        try:
            if os.waitpid(-1, os.WNOHANG)[0]:
                continue
        except ChildProcessError:
            return
        for pid in descendants():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.01)


def descendants() -> list[int]:
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        children.setdefault(int(fields[1]), []).append(int(stat.parent.name))
    found, new = [], [os.getpid()]
    while new:
        new = [child for pid in new for child in children.get(pid, ())]
        found += new
    return found


def end_by(number: int) -> None:
    """End this process by the signal that ended the worker, without a core dump of its own."""
    ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)  # PR_SET_DUMPABLE
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
    if number not in (signal.SIGKILL, signal.SIGSTOP):
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
