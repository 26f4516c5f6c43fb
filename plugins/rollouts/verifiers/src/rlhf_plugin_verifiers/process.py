"""The run's side of a process of the environment's Python."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
from pathlib import Path
from typing import Any

from rlhf.errors import RolloutError
from rlhf.supervisor import end, supervised
from rlhf_endpoint.child_process import Pipe, ending, passed_environment

from rlhf_plugin_verifiers.config import VerifiersConfig, own_python

PROGRAM = Path(__file__).with_name("environment_process.py")
LONGEST_LINE = 2**26
STOP_DEADLINE = 5.0
"""Seconds in which a sample that was cancelled must end. Otherwise its process is killed, with all its samples."""
_TAIL = 2000
"""Number of bytes kept from the end of the process's output."""


class EnvironmentProcess:
    """Plays all requested samples concurrently in one process. The process starts with the first sample, and a new one
    starts after its end. It is killed when the event loop of the run ends."""

    def __init__(self, config: VerifiersConfig) -> None:
        self._config = config
        self.samples = 0
        """Number of current samples, which the rollout counts."""
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._started: asyncio.Future[asyncio.subprocess.Process] | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def play(self, request: dict[str, Any]) -> dict[str, Any]:
        """``reward``, ``metrics`` and ``truncated`` of one sample. Raises RolloutError."""
        process = await self._running()
        number = next(self._numbers)
        done = self._waiting[number] = asyncio.get_running_loop().create_future()
        self._send(process, {"number": number, **request})
        try:
            played = await asyncio.shield(done)
        except asyncio.CancelledError:
            self._send(process, {"number": number, "cancel": True})
            self._keep(self._stopped(process, done))
            raise
        if "failed" in played:
            raise RolloutError(played["failed"])
        return played

    async def _running(self) -> asyncio.subprocess.Process:
        """The process, when it has loaded the environment. Its start goes on if the sample that began it is cancelled.
        An environment that could not be loaded is not tried again."""
        while True:
            if self._started is None:
                self._started = asyncio.ensure_future(self._start())
            process = await asyncio.shield(self._started)
            if self._started is not None:  # it may have ended since
                return process

    async def _start(self) -> asyncio.subprocess.Process:
        """Raises RolloutError: the environment cannot be loaded."""
        config, output = self._config, Pipe(_TAIL)
        python = own_python(config.python)
        environment = passed_environment(config.environment, python if config.python is not None else None)
        try:
            process = await asyncio.create_subprocess_exec(
                *supervised([python, str(PROGRAM), json.dumps({"id": config.id, "args": dict(config.args)})]),
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=output.write_end,
                start_new_session=True,  # the keys of a terminal (Ctrl-C) reach only the run
                limit=LONGEST_LINE, env=environment,
            )  # fmt: skip
        except BaseException as error:
            output.close()
            if not isinstance(error, OSError):
                raise
            raise RolloutError(f"the process of the environment cannot be started: {error}") from error
        output.start()
        load_error: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._keep(self._hold(process, output, load_error))
        if reason := await load_error:
            raise RolloutError(reason)
        return process

    async def _hold(self, process: asyncio.subprocess.Process, output: Pipe, load_error: asyncio.Future[str]) -> None:
        """Hands the process's answers to the samples, until its end."""
        assert process.stdin is not None
        assert process.stdout is not None
        label = f"the environment {self._config.id!r}"
        reason, refused = f"{label} ended with the run", False
        try:
            while line := await process.stdout.readline():
                answer = json.loads(line)
                if "loaded" in answer:
                    refused = bool(answer["loaded"])
                    load_error.set_result(f"{label} cannot be used: {answer['loaded']}" if refused else "")
                elif (done := self._waiting.pop(answer["number"], None)) is not None:
                    done.set_result(answer)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    await process.wait()
            output.read()
            end_text = "closed its connection" if process.returncode is None else ending(process.returncode)
            reason = f"the process of {label} {end_text}{output.text()}"
        finally:
            if not refused:
                self._started = None  # the next sample starts another process
            if not load_error.done():
                load_error.set_result(reason)
            for done in self._waiting.values():
                done.set_result({"failed": reason})
            self._waiting.clear()
            _kill(process)
            process.stdin.close()
            output.close()
            await process.wait()

    async def _stopped(self, process: asyncio.subprocess.Process, done: asyncio.Future[dict[str, Any]]) -> None:
        """Kill the process if a cancelled sample does not end, because its event loop is blocked."""
        await asyncio.wait({done}, timeout=STOP_DEADLINE)
        if not done.done():
            _kill(process)

    def _send(self, process: asyncio.subprocess.Process, line: dict[str, Any]) -> None:
        assert process.stdin is not None
        if not process.stdin.is_closing():  # else all that wait are notified of its end
            process.stdin.write(json.dumps(line).encode() + b"\n")

    def _keep(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _kill(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        end(process.pid)
