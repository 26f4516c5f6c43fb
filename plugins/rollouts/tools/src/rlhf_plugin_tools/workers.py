"""Plain ``def`` functions run in worker processes, because a process can be killed at its deadline."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys
from collections.abc import Sequence
from typing import Any

from rlhf.errors import RolloutError
from rlhf.supervisor import end, supervised

from rlhf_plugin_tools.functions import PythonFunction, Source
from rlhf_plugin_tools.output import Output
from rlhf_plugin_tools.tool import Tool, ToolError, too_slow

START_DEADLINE = 120.0
"""Maximum seconds for a worker to import the functions. This time is not part of a call's timeout."""
LONGEST_LINE = 1 << 26


class Worker:
    """One process. After a failure it is killed, and another one takes its place."""

    def __init__(self, process: asyncio.subprocess.Process, output: Output) -> None:
        self._process, self._output = process, output

    @classmethod
    async def start(cls, sources: Sequence[Source], longest: int) -> Worker:
        """Raises RolloutError."""
        output = Output("tools")
        try:
            process = await asyncio.create_subprocess_exec(
                *supervised([sys.executable, "-P", "-m", "rlhf_plugin_tools.worker_process"]),
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=output.stream,
                start_new_session=True,  # the keys of a terminal (Ctrl-C) reach only the run
                limit=LONGEST_LINE,
            )  # fmt: skip
        except OSError as error:
            output.close()
            raise RolloutError(f"the worker process of rollout.functions cannot start: {error}") from None
        output.started()
        worker = cls(process, output)
        listed = [[s.path, s.text, s.name] for s in sources]
        try:
            async with asyncio.timeout(START_DEADLINE):
                answer = await worker.ask({"path": sys.path, "sources": listed, "longest": longest}, "its start")
        except TimeoutError:
            await worker.ended()
            raise RolloutError(
                f"the worker process of rollout.functions did not start in {START_DEADLINE:g} s{output.tail()}"
            ) from None
        if "broken" in answer:
            worker.kill()
            await worker.ended()
            raise RolloutError(f"the worker process of rollout.functions cannot start: {answer['broken']}")
        return worker

    async def ask(self, request: dict[str, Any], doing: str) -> dict[str, Any]:
        """The answer to one request. Kills the process where it breaks or where this call is cancelled. Raises
        RolloutError where it broke."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            with contextlib.suppress(ConnectionError):  # the answer is then empty
                await self._process.stdin.drain()
            line = await self._process.stdout.readline()
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
        return self._process.returncode is None

    async def ended(self) -> None:
        await self._process.wait()

    def kill(self) -> None:
        if self._process.returncode is None:
            end(self._process.pid)
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._output.close()

    async def _ending(self) -> str:
        try:
            async with asyncio.timeout(1.0):
                code = await self._process.wait()
        except TimeoutError:
            return "closed its connection"
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"


class Workers:
    """Processes that have the functions of all ``sources``. As many are started as calls are under way at once."""

    def __init__(self, sources: Sequence[Source], longest: int) -> None:
        self._sources, self._longest = list(sources), longest
        self._idle: list[Worker] = []
        self._all: set[Worker] = set()
        """Those that run, and those that were killed but have not ended."""

    async def start(self) -> None:
        """Start a first worker. Raises RolloutError."""
        if self._sources:
            self._idle.append(await self._worker())

    async def call(self, name: str, arguments: str, timeout: float) -> str:
        """Raises ToolError or RolloutError."""
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
        await asyncio.gather(*(worker.ended() for worker in self._all))
        self._idle.clear()
        self._all.clear()

    async def _worker(self) -> Worker:
        self._all = {worker for worker in self._all if worker.running}
        self._idle = [worker for worker in self._idle if worker.running]
        if self._idle:
            return self._idle.pop()
        worker = await Worker.start(self._sources, self._longest)
        self._all.add(worker)
        return worker


class PlainFunction(Tool):
    """A ``def`` function, called in a worker process."""

    def __init__(self, function: PythonFunction, workers: Workers) -> None:
        self.name, self.schema, self.source = function.name, function.schema, function.what
        self._workers = workers

    async def call(self, arguments: str, timeout: float, longest: int) -> str:
        return await self._workers.call(self.name, arguments, timeout)
