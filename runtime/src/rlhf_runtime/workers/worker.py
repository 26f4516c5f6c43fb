"""A worker process, seen from the driver. Plugins written with plain ``def`` run in one: a process can be killed at its
deadline, a thread cannot.

A worker is a fresh interpreter (the driver, with torch and its threads, is never forked) that imports the one plugin
it serves. What crosses: the plugin's reference, its config as JSON, rows and trajectories as data, results as JSON.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import json
import os
import pickle
import secrets
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections import deque
from pathlib import Path
from typing import Any

from rlhf.errors import RlhfError, shown
from rlhf.interfaces.component import ComponentConfig
from rlhf.plugins import Resolved
from rlhf.plugins.resolved import IN_PROCESS

from rlhf_runtime.workers.deadlines import DeadlineExpired, within
from rlhf_runtime.workers.worker_process import HEADER

START_DEADLINE = 120.0
"""Seconds a worker may take to import its plugin; not part of a call's deadline."""
KEPT_LINES = 12
"""Last lines of a worker's output that the error about its death shows."""

MARK = "RLHF_WORKER"
"""Environment variable that all processes have in common which a worker has started, whatever session they are in."""
MOST_BYTES = 1 << 30
"""Of one answer. More is a plugin that wrote to the socket itself, or would fill the memory of the run."""
MOST_COPIED = 64 << 20
"""Bytes of a class of this process, with all that it uses, that are copied to each of its workers."""

_alive: weakref.WeakSet[Worker] = weakref.WeakSet()


class WorkerDied(Exception):
    """The process ended without answering, or answered what nobody can read."""


class Worker:
    """One process that serves one plugin. After any failure of the process itself it is dead; the pool starts another.

    ``error`` is the class raised for everything that goes wrong, with ``what`` (by default the plugin and its
    distribution) in its message.
    """

    def __init__(
        self, resolved: Resolved, config: ComponentConfig | None, error: type[RlhfError], what: str = ""
    ) -> None:
        self.what, self.error, self.alive = what or str(resolved), error, True
        self._build = (_reference(resolved, error), None if config is None else config.model_dump_json())
        self._socket, theirs = socket.socketpair()
        lifeline, self._lifeline = os.pipe()
        environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
        environment.setdefault("OMP_NUM_THREADS", "1")  # many workers share the machine
        self._mark = environment[MARK] = secrets.token_hex(16)
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "rlhf_runtime.workers.worker_process", str(theirs.fileno()), str(lifeline)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=(theirs.fileno(), lifeline),
            env=environment,
            start_new_session=True,  # so that a kill of its group reaches what the plugin itself has started
        )
        theirs.close()
        os.close(lifeline)
        self._socket.setblocking(False)
        self._lines: deque[str] = deque(maxlen=KEPT_LINES)
        self._reader = threading.Thread(target=self._read_output, daemon=True)
        self._reader.start()
        _alive.add(self)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether the process itself is still there."""
        return self.alive and self._process.poll() is None

    async def start(self) -> None:
        """Import the plugin there and build it with its config."""
        await self.call("path", list(sys.path), deadline=START_DEADLINE)
        await self.call("build", *self._build, deadline=START_DEADLINE)

    async def call(self, method: str, *arguments: Any, deadline: float) -> Any:
        """What ``method`` returns there, as JSON values. Raises ``error``; kills the process where it expired, died or
        nobody waits for the answer any more."""
        doing = "starting" if method in ("path", "build") else f"{method}()"
        try:
            answer = await within(self._exchange(pickle.dumps((method, arguments))), deadline)
        except DeadlineExpired:
            self.kill()
            raise self.error(
                f"{self.what}: {doing} took longer than its deadline of {deadline:g} s; its worker process was killed. "
                "Make it faster or raise `deadline` in its section."
            ) from None
        except WorkerDied as death:
            self.kill()
            raise self.error(f"{self.what}: its worker process {death} during {doing}{self._output()}") from None
        except BaseException:  # cancelled: the answer would be taken for that of the next call
            self.kill()
            raise
        if "raised" in answer:
            raise self.error(f"{self.what}: {doing} raised {answer['raised']}")
        if "invalid" in answer:
            raise self.error(f"{self.what}: {doing} {answer['invalid']}")
        return answer["reply"]

    def kill(self) -> None:
        """End the process, and what it started, at once. Does nothing the second time."""
        if not self.alive:
            return
        self.alive = False
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        kill_marked(f"{MARK}={self._mark}".encode())
        self._socket.close()
        os.close(self._lifeline)
        self._reader.join(timeout=1.0)

    async def _exchange(self, request: bytes) -> dict[str, Any]:
        loop = asyncio.get_running_loop()
        try:
            await loop.sock_sendall(self._socket, HEADER.pack(len(request)) + request)
            size = HEADER.unpack(await self._exactly(loop, HEADER.size))[0]
            if size > MOST_BYTES:
                raise WorkerDied(f"announced an answer of {size} bytes, of at most {MOST_BYTES}, and was killed")
            body = await self._exactly(loop, size)
        except ConnectionError:
            raise WorkerDied(await self._ending()) from None
        try:
            answer = json.loads(body)
        except (ValueError, RecursionError):  # no JSON, or a number or a nesting that Python does not read
            answer = None
        if not isinstance(answer, dict) or len(answer) != 1 or not answer.keys() <= {"reply", "raised", "invalid"}:
            raise WorkerDied(f"sent what is no answer ({shown(body)}) and was killed")
        return answer

    async def _exactly(self, loop: asyncio.AbstractEventLoop, size: int) -> bytes:
        parts = bytearray()
        while len(parts) < size:
            part = await loop.sock_recv(self._socket, min(size - len(parts), 1 << 20))
            if not part:
                raise ConnectionError
            parts += part
        return bytes(parts)

    async def _ending(self) -> str:
        """How the process ended, in words."""
        for _ in range(100):
            if self._process.poll() is not None:
                break
            await asyncio.sleep(0.01)
        code = self._process.returncode
        if code is None:
            return "closed its connection"
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"

    def _output(self) -> str:
        lines = "\n  ".join(self._lines)
        return f". Its last output:\n  {lines}" if lines else ""

    def _read_output(self) -> None:
        """Show what the plugin prints, line by line, with its name; a ``print`` there must not be lost."""
        assert self._process.stdout is not None
        with self._process.stdout as stream:
            while line := stream.readline(8192).decode(errors="replace"):
                self._lines.append(line.rstrip())
                with contextlib.suppress(ValueError, OSError):  # stderr closed at interpreter exit
                    sys.stderr.write(f"[{self.what}] {line.rstrip()}\n")


def kill_marked(mark: bytes) -> None:
    """End every process of this user whose environment holds ``mark`` (``NAME=VALUE``): what a worker has started in a
    session of its own (``start_new_session``, ``setsid``) is not in its group. Linux only; elsewhere, and where a
    process was given an environment of its own, the group is all that ends."""
    for _ in range(10):  # one that is started meanwhile is found the next time
        found = [int(path.parent.name) for path in Path("/proc").glob("[0-9]*/environ") if mark in _environment(path)]
        for pid in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if not found:
            return


def _environment(path: Path) -> list[bytes]:
    try:
        return path.read_bytes().split(b"\0")
    except OSError:  # it has ended, or is not ours
        return []


def _reference(resolved: Resolved, error: type[RlhfError]) -> bytes:
    """What another process makes the plugin's class of: its reference, by which the class is imported again, or, for a
    class of this process, the class with the code of its module that it uses (cloudpickle)."""
    cls = resolved.cls
    if resolved.distribution != IN_PROCESS:
        return pickle.dumps(resolved)
    import cloudpickle

    module = sys.modules.get(cls.__module__)
    by_value = _is_local(cls.__module__) and cls.__module__ not in cloudpickle.list_registry_pickle_by_value()
    try:
        if by_value:
            cloudpickle.register_pickle_by_value(module)
        made: bytes = cloudpickle.dumps(resolved)
    except Exception as cause:  # pickle.PicklingError, TypeError, and whatever an object's __reduce__ raises
        raise error(
            f"{resolved}: it is plain `def`, so it runs in worker processes and is copied to them, and something that "
            f"it uses cannot be copied: {type(cause).__name__}: {cause}. Make that inside of the function, or write "
            "the function as `async def`: it is then called in this process."
        ) from cause
    finally:
        if by_value:
            cloudpickle.unregister_pickle_by_value(module)
    if len(made) > MOST_COPIED:
        raise error(
            f"{resolved}: it is plain `def`, so it is copied to worker processes, and it uses {len(made) >> 20} MiB of "
            f"data of this process; at most {MOST_COPIED >> 20} MiB are copied. Load the data inside of the function, "
            "or write the function as `async def`: it is then called in this process."
        )
    return made


def _is_local(module: str) -> bool:
    """Whether a module's code must travel with what it defines: that of a script, a notebook or a test, which another
    process may not be able to import. An installed package is imported there. (``__main__`` travels in any case.)"""
    file = getattr(sys.modules.get(module), "__file__", None)
    installed = module.partition(".")[0] in sys.stdlib_module_names or "site-packages" in Path(file or "").parts
    return module in sys.modules and module != "__main__" and not installed


@atexit.register
def _kill_all() -> None:
    for worker in list(_alive):
        worker.kill()
