"""Child processes that end when this process ends, in whatever way, together with their descendants.

On Linux a supervisor (:mod:`rlhf.supervisor`) starts each :class:`Child`. This process has one supervisor, which starts
with the first child. On other systems this process starts the child itself, and :meth:`Child.end` ends only the child's
process group.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import marshal
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterable, Mapping, Sequence

from rlhf import supervisor


class Child:
    """A process in its own session. If the program cannot be started, the child writes this to its standard error and
    exits with code 127.

    Args:
        stdin: a descriptor; None: no input. The caller closes its descriptors afterwards.
        pass_fds: descriptors that the child has by the same numbers.
        env: all environment variables; None: those of this process.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        stdin: int | None = None,
        stdout: int,
        stderr: int,
        pass_fds: Iterable[int] = (),
        env: Mapping[str, str] | None = None,
    ) -> None:
        self._reading = threading.Lock()
        self._status: int | None = None
        self._process: subprocess.Popen[bytes] | None = None
        if sys.platform != "linux":
            source = subprocess.DEVNULL if stdin is None else stdin
            self._process = subprocess.Popen(
                command, stdin=source, stdout=stdout, stderr=stderr, pass_fds=(*pass_fds,), env=env,
                start_new_session=True,
            )  # fmt: skip
            return
        streams = {0: stdin, 1: stdout, 2: stderr, **{number: number for number in pass_fds}}
        control, guards_end = socket.socketpair()
        with guards_end, open(os.devnull, "rb") as null_file:
            sources = [null_file.fileno() if source is None else source for source in streams.values()]
            variables = os.environb if env is None else {os.fsencode(k): os.fsencode(v) for k, v in env.items()}
            words = [os.fsencode(word) for word in command]
            request = marshal.dumps((words, dict(variables), os.fsencode(os.getcwd()), [*streams]))
            _start(request, [guards_end.fileno(), *sources])
        self._control = control.detach()
        # Closing this end also ends the child, because the guard's end becomes readable.
        weakref.finalize(self, os.close, self._control)

    @property
    def returncode(self) -> int | None:
        """As :attr:`subprocess.Popen.returncode`. None: the child or one of its descendants still runs."""
        return self.wait() if self.ends_within(0) else None

    def ends_within(self, seconds: float) -> bool:
        """Wait at most ``seconds``. Returns whether the child and all its descendants have ended."""
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(seconds)
            return self._process.returncode is not None
        return self._status is not None or self._readable(seconds * 1000)

    def wait(self) -> int:
        """The return code, after the child and all that it started have ended."""
        if self._process is not None:
            return self._process.wait()
        self._readable(None)
        with self._reading:
            if self._status is None:
                # without a status the guard was killed, and the kernel has killed the child
                status = b""
                with contextlib.suppress(ConnectionResetError):
                    status = os.read(self._control, 4)
                self._status = int.from_bytes(status, "big") if status else int(signal.SIGKILL)
        return os.waitstatus_to_exitcode(self._status)

    async def wait_async(self) -> int:
        """The return code, after the child and all that it started have ended."""
        if self._process is not None:
            return await asyncio.to_thread(self._process.wait)
        if self._status is None:
            loop, readable = asyncio.get_running_loop(), asyncio.Event()
            control = os.dup(self._control)  # a loop has one reader for a descriptor, but several coroutines may wait
            loop.add_reader(control, readable.set)
            try:
                await readable.wait()
            finally:
                loop.remove_reader(control)
                os.close(control)
        return self.wait()

    def end(self) -> None:
        """Kill the child and all that it started. Does not wait for their end."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
        elif self._status is None:
            with contextlib.suppress(OSError):  # it has ended
                os.write(self._control, b"e")

    def _readable(self, milliseconds: float | None) -> bool:
        # Not select(), which refuses descriptors from 1024 on.
        readable = select.poll()
        readable.register(self._control, select.POLLIN)
        return bool(readable.poll(milliseconds))


class _Supervisor:
    def __init__(self) -> None:
        self._channel, channel = socket.socketpair()
        with channel:
            ends = [str(os.getpid()), supervisor.SERVE, str(channel.fileno())]
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", supervisor.__file__, *ends],
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, pass_fds=(channel.fileno(),),
                start_new_session=True,
            )  # fmt: skip

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def start(self, request: bytes, descriptors: Sequence[int]) -> None:
        """See :func:`rlhf.supervisor.serve`."""
        socket.send_fds(self._channel, [len(request).to_bytes(8, "big")], descriptors)
        self._channel.sendall(request)

    def forget(self) -> None:
        """Disconnect a fork of this process from the supervisor, without waiting for it: it is not the fork's child."""
        self._channel.close()
        self._process.returncode = 0

    def close(self) -> None:
        with contextlib.suppress(OSError):  # it has ended
            self._channel.shutdown(socket.SHUT_RDWR)  # a fork of this process may have the channel too
        self._channel.close()
        self._process.wait()


_supervisor: _Supervisor | None = None
_starting = threading.Lock()


def _start(request: bytes, descriptors: Sequence[int]) -> None:
    global _supervisor
    with _starting:
        if _supervisor is None or not _supervisor.running:
            _supervisor = _Supervisor()
        # Inside the lock, so that the requests of two threads do not mix.
        _supervisor.start(request, descriptors)


def _forget() -> None:
    """Reset the state in a fork of this process: no supervisor, and a lock that no thread holds."""
    global _supervisor, _starting
    if _supervisor is not None:
        _supervisor.forget()
    _supervisor, _starting = None, threading.Lock()


@atexit.register
def _close() -> None:
    if _supervisor is not None:
        _supervisor.close()


os.register_at_fork(after_in_child=_forget)
