"""The driver's side of a worker process. Plugins written with plain ``def`` run in a worker process, because a process
can be killed at its deadline and a thread cannot.

A worker is a fresh interpreter (the driver, with torch and its threads, is never forked) that imports the one plugin
it serves. The driver sends the plugin's reference, its config as JSON, and pickled rows and trajectories. The worker
sends results as JSON.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import copyreg
import io
import json
import os
import pickle
import select
import signal
import socket
import sys
import threading
import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from rlhf.children import Child
from rlhf.control_groups import usable_cores
from rlhf.errors import RlhfError, brief
from rlhf.interfaces.component import ComponentConfig
from rlhf.plugins import Resolved
from rlhf.plugins.resolved import IN_PROCESS
from rlhf.types import Row
from rlhf.types.rows import ReadFields

from rlhf_runtime.calls import isolation
from rlhf_runtime.calls.deadlines import DeadlineExpired, with_deadline
from rlhf_runtime.calls.plugin_process import HEADER

START_DEADLINE = 120.0
"""Maximum seconds for a worker to import its plugin. This time is not part of a call's deadline."""
MOST_STARTS = max(16, usable_cores())
"""Largest number of workers that start at the same time. More would only share the processors until their deadline."""
KEPT_LINES = 12
"""Number of last lines of a worker's output that the error about its death shows."""

MOST_BYTES = 1 << 30
"""Maximum bytes of one answer. A larger answer means that the plugin wrote to the socket itself, or would fill the
memory of the run."""
_alive: weakref.WeakSet[PluginWorker] = weakref.WeakSet()
_starts: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = weakref.WeakKeyDictionary()
"""Limits the starts of each event loop to :data:`MOST_STARTS`."""


class WorkerDied(Exception):
    """The process ended without an answer, or sent an invalid one."""


class PluginWorker:
    """One process that serves one plugin. After a failure of the process itself the worker stays dead, and the pool
    starts another one.

    ``error`` is the class of all raised errors. Their messages contain ``label``, by default the plugin and its
    distribution. ``python``: the program that runs it, if it is not the Python of this process
    (:mod:`rlhf_runtime.calls.isolation`).
    """

    def __init__(
        self,
        resolved: Resolved,
        config: ComponentConfig | None,
        error: type[RlhfError],
        label: str = "",
        python: str | None = None,
    ) -> None:
        self.label, self.error, self.alive = label or str(resolved), error, True
        self._resolved, self._python = resolved, python
        self._build = (reference(resolved, error), None if config is None else config.model_dump_json())
        self._socket, peer = socket.socketpair()
        environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
        environment.setdefault("OMP_NUM_THREADS", "1")  # many workers share the machine
        environment.setdefault("PYTHONHASHSEED", "0")  # sets of texts have one order in every worker
        end = str(peer.fileno())
        # -P: as in the program `rlhf`, modules are not imported from the current folder.
        program = [sys.executable, "-P", "-m", "rlhf_runtime.calls.plugin_process", end]
        if python is not None:
            environment = isolation.environment(python, environment)
            program = isolation.command(resolved, python, end)
        read_end, write_end = os.pipe()
        self._process = Child(program, stdout=write_end, stderr=write_end, pass_fds=(peer.fileno(),), env=environment)
        peer.close()
        os.close(write_end)
        self._socket.setblocking(False)
        self._lines: deque[str] = deque(maxlen=KEPT_LINES)
        self._reader = threading.Thread(target=self._read_output, args=(read_end,), daemon=True)
        self._reader.start()
        _alive.add(self)

    @property
    def running(self) -> bool:
        """Whether the process itself is still running, between two calls."""
        if not self.alive or self._process.returncode is not None:
            return False
        connection = select.poll()  # the end of the connection is seen before the exit code
        connection.register(self._socket, select.POLLIN)
        return not connection.poll(0)

    async def start(self) -> None:
        """Import the plugin in the process and build it with its config."""
        if self._python is None:
            await self.call("path", list(sys.path), deadline=START_DEADLINE)
        else:
            requirements = isolation.requirements(self._resolved)
            arguments = f"{self._resolved.ref} --kind {self._resolved.kind}"
            if missing := await self.call("unmet", requirements, isolation.EXTRA, deadline=START_DEADLINE):
                raise self.error(
                    f"{self.label}: {self._python} does not meet the plugin's requirements: {'; '.join(missing)}. "
                    f"Install them there, or create another environment with `rlhf plugins isolate {arguments} "
                    "--output DIR`."
                )
        await self.call("build", *self._build, deadline=START_DEADLINE)

    async def call(self, method: str, *arguments: Any, deadline: float) -> Any:
        """Call ``method`` in the process and return its result as JSON values. Raises ``error``. Kills the process if
        it exceeds the deadline or fails, or if this call is cancelled."""
        doing = "starting" if method in ("path", "unmet", "build") else f"{method}()"
        try:
            answer = await with_deadline(self._exchange(request(method, arguments)), deadline)
        except DeadlineExpired:
            self.kill()
            raise self.error(
                f"{self.label}: {doing} took longer than its deadline of {deadline:g} s; its worker process was "
                "killed. Make it faster or raise `deadline` in its section."
            ) from None
        except WorkerDied as death:
            self.kill()
            raise self.error(f"{self.label}: its worker process {death} during {doing}{self._output()}") from None
        except BaseException:  # cancelled: the next call would read this call's answer
            self.kill()
            raise
        if "raised" in answer:
            raise self.error(f"{self.label}: {doing} raised {answer['raised']}")
        if "invalid" in answer:
            raise self.error(f"{self.label}: {doing} {answer['invalid']}")
        return answer["reply"]

    def kill(self) -> None:
        """Kill the process and everything that it started. A second call does nothing."""
        if not self.alive:
            return
        self.alive = False
        self._process.end()
        self._process.wait()
        self._socket.close()
        self._reader.join(timeout=1.0)

    async def _exchange(self, request: bytes) -> dict[str, Any]:
        loop = asyncio.get_running_loop()
        try:
            await loop.sock_sendall(self._socket, HEADER.pack(len(request)) + request)
            size = HEADER.unpack(await self._exactly(loop, HEADER.size))[0]
            if size > MOST_BYTES:
                raise WorkerDied(f"announced an answer of {size} bytes (allowed: at most {MOST_BYTES}) and was killed")
            body = await self._exactly(loop, size)
        except ConnectionError:
            raise WorkerDied(await self._ending()) from None
        try:
            answer = json.loads(body)
        except (ValueError, RecursionError):  # not JSON, or a number or nesting that Python refuses to parse
            answer = None
        if not isinstance(answer, dict) or len(answer) != 1 or not answer.keys() <= {"reply", "raised", "invalid"}:
            raise WorkerDied(f"sent an invalid answer ({brief(body)}) and was killed")
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
        """A text that says how the process ended."""
        for _ in range(100):
            if self._process.returncode is not None:
                break
            await asyncio.sleep(0.01)
        code = self._process.returncode
        if code is None:
            return "closed its connection"
        cause = " (as the system does when memory runs out)" if code == -signal.SIGKILL else ""
        return f"was killed by {signal.Signals(-code).name}{cause}" if code < 0 else f"exited with code {code}"

    def _output(self) -> str:
        lines = "\n  ".join(self._lines)
        return f". Its last output:\n  {lines}" if lines else ""

    def _read_output(self, descriptor: int) -> None:
        """Show the plugin's output line by line, with the plugin's name, so that no ``print`` is lost."""
        with open(descriptor, "rb") as stream:
            while line := stream.readline(8192).decode(errors="replace"):
                self._lines.append(line.rstrip())
                with contextlib.suppress(ValueError, OSError):  # stderr closed at interpreter exit
                    sys.stderr.write(f"[{self.label}] {line.rstrip()}\n")


@atexit.register
def _kill_all() -> None:
    for worker in list(_alive):
        worker.kill()


class WorkerPool:
    """At most ``size`` workers of one plugin. Callers that wait for a worker are served in order of arrival.

    Args:
        make: makes a worker that is not started.
    """

    def __init__(self, make: Callable[[], PluginWorker], size: int) -> None:
        self._make, self._free = make, asyncio.Semaphore(size)
        self._idle: list[PluginWorker] = []
        self._workers: list[PluginWorker] = []

    @contextlib.asynccontextmanager
    async def worker(self) -> AsyncIterator[PluginWorker]:
        """A worker for exclusive use. The time spent waiting for it is not part of any deadline."""
        worker = await self.acquire()
        try:
            yield worker
        finally:
            self.release(worker)

    async def acquire(self) -> PluginWorker:
        """A started worker that belongs to the caller until :meth:`release`."""
        await self._free.acquire()
        try:
            while self._idle:
                worker = self._idle.pop()
                if worker.running:
                    return worker
                worker.kill()  # it died while idle, which is not a failure of this call
                self._workers.remove(worker)
            async with _starts.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(MOST_STARTS)):
                return await self._start()
        except BaseException:
            self._free.release()
            raise

    async def _start(self) -> PluginWorker:
        worker = self._make()
        self._workers.append(worker)
        try:
            await worker.start()
        except BaseException:
            worker.kill()
            self._workers.remove(worker)
            raise
        return worker

    def release(self, worker: PluginWorker) -> None:
        """Return a worker to the pool. A dead one is replaced when the next one is needed."""
        if worker.alive:
            self._idle.append(worker)
        else:
            self._workers.remove(worker)
        self._free.release()

    def close(self) -> None:
        """Kill all workers."""
        for worker in self._workers:
            worker.kill()
        self._idle.clear()


MOST_COPIED = 64 << 20
"""Maximum bytes of a class defined in this process, with everything that it uses, when it is copied to a worker."""


def _reduce_row(row: Row) -> tuple[type[Row], tuple[Any, ...]]:
    layout = None if row.layout is None else ReadFields(row.layout.read(row.columns))
    return Row, (row.columns, row.source, row.index, layout)


class _RequestPickler(pickle.Pickler):
    dispatch_table = copyreg.dispatch_table | {Row: _reduce_row}


def request(method: str, arguments: tuple[Any, ...]) -> bytes:
    """The bytes of a call. Rows are sent with their fields instead of their layout, because another Python cannot
    import its class."""
    buffer = io.BytesIO()
    _RequestPickler(buffer).dump((method, arguments))
    return buffer.getvalue()


def reference(resolved: Resolved, error: type[RlhfError]) -> bytes:
    """Bytes from which a worker process obtains the plugin's class. For an installed plugin this is its reference,
    which the worker imports. For a class defined in this process it is the class with the code that it uses
    (cloudpickle)."""
    cls = resolved.cls
    if resolved.distribution != IN_PROCESS:
        return pickle.dumps(resolved)
    import cloudpickle

    module = sys.modules.get(cls.__module__)
    by_value = _is_local(cls.__module__) and cls.__module__ not in cloudpickle.list_registry_pickle_by_value()
    try:
        if by_value:
            cloudpickle.register_pickle_by_value(module)
        payload: bytes = cloudpickle.dumps(resolved)
    except Exception as cause:  # pickle.PicklingError, TypeError, and any error of an object's __reduce__
        raise error(
            f"{resolved}: it is a plain `def`, so it is copied to worker processes and runs there, but something that "
            f"it uses cannot be copied: {type(cause).__name__}: {cause}. Create that object inside the function, or "
            "write the function as `async def`: it is then called in this process."
        ) from cause
    finally:
        if by_value:
            cloudpickle.unregister_pickle_by_value(module)
    if len(payload) > MOST_COPIED:
        raise error(
            f"{resolved}: it is a plain `def`, so it is copied to worker processes, but it uses {len(payload) >> 20} "
            f"MiB of data of this process; at most {MOST_COPIED >> 20} MiB are copied. Load the data inside the "
            "function, or write the function as `async def`: it is then called in this process."
        )
    return payload


def _is_local(module: str) -> bool:
    """Whether a module's code must be copied to worker processes: the code of a script, a notebook or a test, which
    another process may not be able to import. False for installed packages, which workers import, and for ``__main__``,
    which cloudpickle always copies."""
    file = getattr(sys.modules.get(module), "__file__", None)
    installed = module.partition(".")[0] in sys.stdlib_module_names or "site-packages" in Path(file or "").parts
    return module in sys.modules and module != "__main__" and not installed
