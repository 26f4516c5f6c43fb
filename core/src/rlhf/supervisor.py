"""Processes that end a worker and all its descendants when the driver has ended, or on the driver's request.

    python -I -S supervisor.py DRIVER_PID --serve CHANNEL
    python -I -S supervisor.py DRIVER_PID COMMAND...

The first form is the supervisor of a driver. :mod:`rlhf.children` starts it once and sends it requests for children.
For each child it forks a guard, which is the parent of one worker. Guards only wait, so they share the supervisor's
memory. The second form is a single guard, for libraries that start a process by its command line (:func:`supervised`).
It exits as the worker did: with its exit status, or by its signal.

Descendants whose parents ended become children of the guard (PR_SET_CHILD_SUBREAPER), so none can escape. If the guard
itself is killed, the worker is killed by the kernel (PR_SET_PDEATHSIG). If the supervisor is killed, all guards end
their workers. This file uses the standard library only, and few modules of it, so that it starts quickly and stays
small.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import select
import signal
import sys
import time
from collections.abc import Mapping, Sequence

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER = 1, 4, 36
LOOK_SECONDS = 0.5
"""Interval between two checks that the driver is alive."""
SERVE = "--serve"
STOPS = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
MOST_DESCRIPTORS = 64
"""Largest number of descriptors in one request."""


def supervised(command: Sequence[str]) -> list[str]:
    """The command line that runs ``command`` under its own guard. SIGTERM from this process ends the guard with all
    descendants. On systems other than Linux there is no guard."""
    if sys.platform != "linux":
        return list(command)
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), *command]


def end(pid: int) -> None:
    """End the worker whose guard is ``pid``, and all its descendants. Does not wait for it."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if sys.platform == "linux":
            os.kill(pid, signal.SIGTERM)
        else:
            os.killpg(pid, signal.SIGKILL)


def ignore_stops() -> None:
    """Ignore the signals that ask a process to stop. For workers, which the driver ends: a job server may send SIGTERM
    to the driver and to all its descendants, and the driver still needs them for its step. Processes that this one
    starts or forks do not ignore the signals."""
    process_id = os.getpid()

    def ignore(number: int, frame: object) -> None:
        if os.getpid() != process_id:
            end_by(number)

    for number in STOPS:
        signal.signal(number, ignore)


def serve(driver: int, channel: int) -> None:
    """Start a guard and its worker for each request, until the driver has ended.

    A request consists of the length of its body (8 bytes, big endian), with descriptors as ancillary data, and of the
    body: command, environment and folder as bytes, and the numbers that the descriptors after the first get in the
    worker. The first descriptor controls the guard: when it becomes readable, the guard ends its worker. The guard
    writes the worker's wait status to it (4 bytes).
    """
    # Imported here, because a single guard needs neither and should start quickly.
    import marshal
    import socket

    ignore_stops()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the guards
    requests, supervisor = socket.socket(fileno=channel), os.getpid()
    while True:
        if not select.select([requests], [], [], LOOK_SECONDS)[0]:
            if os.getppid() != driver:
                return
            continue
        header, descriptors, _, _ = socket.recv_fds(requests, 8, MOST_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC)
        size = int.from_bytes(header, "big")
        body = requests.recv(size, socket.MSG_WAITALL) if header else b""
        if not header or len(body) < size:  # the driver is gone
            return
        command, environment, folder, numbers = marshal.loads(body)
        control, *streams = descriptors
        try:
            child = os.fork()
        except OSError as error:  # the limit of processes
            os.write(2, f"{os.fsdecode(command[0])!r} cannot be started: {error.strerror}\n".encode())
            answer(control, 127 << 8)
            child = -1
        if child == 0:
            requests.close()
            # If it were ignored, the kernel would discard the worker's status.
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.setsid()  # the keys of a terminal (Ctrl-C) reach only the driver
            status = guard(supervisor, command, environment, folder, dict(zip(numbers, streams, strict=True)), control)
            answer(control, status)
            os._exit(0)
        for descriptor in descriptors:
            os.close(descriptor)


def answer(control: int, status: int) -> None:
    with contextlib.suppress(OSError):  # the driver is gone
        os.write(control, status.to_bytes(4, "big"))


def guard(
    parent: int,
    command: list[bytes],
    environment: Mapping[bytes, bytes],
    folder: bytes = b".",
    streams: Mapping[int, int] | None = None,
    control: int = -1,
) -> int:
    """Run a worker. Returns its wait status after it and all its descendants have ended.

    Args:
        parent: this process's parent. The worker ends when it ends.
        streams: descriptors that the worker inherits, by their numbers in the worker.
        control: see :func:`serve`.
    """
    streams = streams or {}
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    awaited = {signal.SIGCHLD, signal.SIGIO, *STOPS}
    # Blocked before the fork, so that a signal that arrives before sigtimedwait() is not lost.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, awaited)
    process_id = os.getpid()
    worker = os.fork()
    if worker == 0:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != process_id:  # it died before the line above
            os._exit(1)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        execute(command, environment, folder, streams)
    # As long as the guard holds a pipe, its reader does not see the end.
    for stream in streams.values():
        os.close(stream)
    controls = [control] if control >= 0 else []
    for descriptor in controls:
        with contextlib.suppress(OSError):  # SIGIO when it can be read; without it the next check notices this
            fcntl.fcntl(descriptor, fcntl.F_SETOWN, process_id)
            fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) | os.O_ASYNC)
    signals: signal.struct_siginfo | None = None
    while not (wait_result := os.waitpid(worker, os.WNOHANG))[0]:
        stopped = signals is not None and signals.si_signo in STOPS and signals.si_pid == parent
        if stopped or os.getppid() != parent or select.select(controls, [], [], 0)[0]:
            os.kill(worker, signal.SIGKILL)
            wait_result = os.waitpid(worker, 0)
            break
        signals = signal.sigtimedwait(awaited, LOOK_SECONDS)
    end_descendants()
    return wait_result[1]


def execute(
    command: list[bytes], environment: Mapping[bytes, bytes], folder: bytes, streams: Mapping[int, int]
) -> None:
    """Replace this process by the worker's program."""
    try:
        # first to numbers above all of the worker's, so that no stream takes another one's number
        first = max(streams, default=0) + 1
        copies = {number: fcntl.fcntl(stream, fcntl.F_DUPFD_CLOEXEC, first) for number, stream in streams.items()}
        for number, copy in copies.items():
            os.dup2(copy, number)
        os.chdir(folder)
        os.execvpe(command[0], command, environment)
    except OSError as error:
        os.write(2, f"{os.fsdecode(command[0])!r} cannot be started: {error.strerror}\n".encode())
        os._exit(127)


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
    """The process ids of all descendants. If /proc cannot be read: 0, which signals the process group."""
    children: dict[int, list[int]] = {}
    try:
        names = os.listdir("/proc")
    except OSError:
        return [0]
    for name in filter(str.isdigit, names):
        try:
            with open(f"/proc/{name}/stat", encoding="utf-8", errors="replace") as stat:
                parent = stat.read().rpartition(")")[2].split()[1]
        except OSError:  # it has ended
            continue
        children.setdefault(int(parent), []).append(int(name))
    pids, new = [], [os.getpid()]
    while new:
        new = [child for pid in new for child in children.get(pid, ())]
        pids += new
    return pids


def end_by(number: int) -> None:
    """End this process by the signal that ended the worker, without a second core dump."""
    ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
    if number not in (signal.SIGKILL, signal.SIGSTOP):
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def main(driver: int, words: list[str]) -> None:
    if words[0] == SERVE:
        serve(driver, int(words[1]))
        return
    status = guard(driver, [os.fsencode(word) for word in words], os.environb)
    if os.WIFSIGNALED(status):
        end_by(os.WTERMSIG(status))
    os._exit(os.WEXITSTATUS(status))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
