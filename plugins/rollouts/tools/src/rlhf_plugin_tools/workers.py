"""Plain ``def`` functions run in worker processes, because a process can be killed at its deadline."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import socket
import sys
from collections.abc import Sequence
from typing import Any

from rlhf.children import Child
from rlhf.errors import RolloutError

from rlhf_plugin_tools.functions import FunctionSource, PythonFunction
from rlhf_plugin_tools.output import Output
from rlhf_plugin_tools.tool import Tool, ToolError, too_slow

START_DEADLINE = 120.0
"""Maximum seconds for a worker to import the functions. This time is not part of a call's timeout."""
LONGEST_LINE = 1 << 26


def first_request(sources: Sequence[FunctionSource], longest: int) -> dict[str, Any]:
    """What a worker needs to start. It holds the text of each file once, however many of its functions are tools."""
    return {
        "path": sys.path,
        "files": {s.file.path: s.file.text for s in sources},
        "functions": [[s.file.path, s.name] for s in sources],
        "longest": longest,
    }


class ToolWorker:
    """One process. After a failure it is killed and replaced."""

    def __init__(
        self, child: Child, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, output: Output
    ) -> None:
        self._child, self._reader, self._writer, self._output = child, reader, writer, output

    @classmethod
    async def start(cls, sources: Sequence[FunctionSource], longest: int) -> ToolWorker:
        """Start the process. Raises RolloutError."""
        output = Output("tools")
        parent_socket, child_socket = socket.socketpair()
        end, command = child_socket.fileno(), [sys.executable, "-P", "-m", "rlhf_plugin_tools.tool_process"]
        try:
            with child_socket:
                child = Child(command, stdin=end, stdout=end, stderr=output.stream.fileno())
        except OSError as error:
            parent_socket.close()
            output.close()
            raise RolloutError(f"the worker process of rollout.functions cannot start: {error}") from None
        output.started()
        worker = cls(child, *await asyncio.open_connection(sock=parent_socket, limit=LONGEST_LINE), output)
        try:
            async with asyncio.timeout(START_DEADLINE):
                answer = await worker.ask(first_request(sources, longest), "its start")
        except TimeoutError:
            await worker.wait_async()
            raise RolloutError(
                f"the worker process of rollout.functions did not start in {START_DEADLINE:g} s{output.tail()}"
            ) from None
        if "broken" in answer:
            worker.kill()
            await worker.wait_async()
            raise RolloutError(f"the worker process of rollout.functions cannot start: {answer['broken']}")
        return worker

    async def ask(self, request: dict[str, Any], doing: str) -> dict[str, Any]:
        """The answer to one request. Kills the process if it fails or this call is cancelled. Raises RolloutError if it
        failed."""
        try:
            self._writer.write(json.dumps(request).encode() + b"\n")
            line = b""
            with contextlib.suppress(ConnectionError):
                await self._writer.drain()
                line = await self._reader.readline()
            if not line.endswith(b"\n"):
                ending = await self._ending()
                raise RolloutError(
                    f"the worker process of rollout.functions {ending} during {doing}{self._output.tail()}"
                )
            answer: dict[str, Any] = json.loads(line)
            return answer
        except BaseException:
            self.kill()
            raise

    @property
    def running(self) -> bool:
        return self._child.returncode is None

    async def wait_async(self) -> None:
        await self._child.wait_async()

    def kill(self) -> None:
        self._child.end()
        self._writer.close()
        self._output.close()

    async def _ending(self) -> str:
        try:
            async with asyncio.timeout(1.0):
                code = await self._child.wait_async()
        except TimeoutError:
            return "closed its connection"
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"


class Workers:
    """Processes that have the functions of all ``sources``. One is started per concurrent call."""

    def __init__(self, sources: Sequence[FunctionSource], longest: int) -> None:
        self._sources, self._longest = list(sources), longest
        self._idle: list[ToolWorker] = []
        self._all: set[ToolWorker] = set()
        """Workers that run, and workers that were killed but have not ended."""

    async def start(self) -> None:
        """Start a first worker. Raises RolloutError."""
        if self._sources:
            worker = await self._worker()  # replaces the list of idle ones
            self._idle.append(worker)

    async def call(self, name: str, arguments: str, timeout: float) -> str:
        """The result of a call in a free worker. Raises ToolError or RolloutError."""
        worker = await self._worker()
        try:
            async with asyncio.timeout(timeout) as limit:
                answer = await worker.ask({"name": name, "arguments": arguments}, f"a call of {name!r}")
        except TimeoutError:
            assert limit.expired()
            raise too_slow(name, timeout) from None
        self._idle.append(worker)
        if "error" in answer:
            raise ToolError(answer["error"])
        result: str = answer["result"]
        return result

    async def close(self) -> None:
        """Kill all workers and wait for their end."""
        for worker in self._all:
            worker.kill()
        await asyncio.gather(*(worker.wait_async() for worker in self._all))
        self._idle.clear()
        self._all.clear()

    async def _worker(self) -> ToolWorker:
        self._all = {worker for worker in self._all if worker.running}
        self._idle = [worker for worker in self._idle if worker.running]
        if self._idle:
            return self._idle.pop()
        worker = await ToolWorker.start(self._sources, self._longest)
        self._all.add(worker)
        return worker


class PlainFunction(Tool):
    """A ``def`` function, called in a worker process."""

    def __init__(self, function: PythonFunction, workers: Workers) -> None:
        self.name, self.schema, self.source = function.name, function.schema, function.label
        self._workers = workers

    async def call(self, arguments: str, timeout: float, longest: int) -> str:
        return await self._workers.call(self.name, arguments, timeout)
