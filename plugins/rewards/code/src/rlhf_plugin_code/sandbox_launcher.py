"""The client of the launcher process: runs programs in a sandbox, several at once."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import subprocess
import sys
import threading
import weakref
from collections.abc import Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import asdict, dataclass, replace
from importlib.resources import files
from itertools import count
from typing import Any, Literal

from rlhf.errors import RewardError

from rlhf_plugin_code.interpreter import Interpreter
from rlhf_plugin_code.limits import ProgramLimits
from rlhf_plugin_code.seccomp import seccomp_filter
from rlhf_plugin_code.starters import STARTERS

PASSED_ON = ("PATH", "PYTHONPATH", "HOME", "LANG", "LD_LIBRARY_PATH", "TMPDIR", "VIRTUAL_ENV")
"""Environment variables of the launcher process. It gets no others, because they may hold secrets."""

Call = tuple[str, Sequence[Any]]
"""(name of a function, its arguments)."""


@dataclass(frozen=True, slots=True)
class Finished:
    """The end of a program that was started."""

    end: Literal["exit", "wall", "output", "threads", "files"]
    """``wall``: killed at the limit of wall time. ``output``: killed for too much output. ``threads``, ``files``:
    killed because it had too many."""
    code: int
    """Exit status. Negative, or 128 and more: a signal."""
    seconds: float
    out: str
    """Standard output, or the lines with answers to calls."""
    err: str
    """End of standard error."""
    nonce: str
    """Prefix of the lines with answers to calls."""


class SandboxLauncher:
    """Starts the launcher process when it is first needed, and again if it died."""

    def __init__(self, sandbox: str, python: Interpreter, limits: ProgramLimits) -> None:
        starter = STARTERS[sandbox]
        limits = limits if starter.disk else replace(limits, disk=0)
        filter_ = seccomp_filter()
        self.sandbox = sandbox
        self._header = {
            "limits": limits.of_process(starter.own_user),
            "filter": b"" if starter.filters_outside else filter_,
        }
        self._settings = {
            "sandbox": sandbox,
            "command": python.command,
            "paths": python.paths,
            "limits": asdict(limits),
            "filter": filter_.hex(),
            "inside": files("rlhf_plugin_code").joinpath("inside.py").read_text(),
        }
        self._process: _Process | None = None
        self._lock = threading.Lock()

    async def run(
        self, program: str, stdin: str = "", calls: Sequence[Call] | None = None, prelude: str = "", values: str = ""
    ) -> Finished:
        """Run a program once.

        Args:
            stdin: its standard input.
            calls: functions of the program that are called one after another; None: the program is run as a script.
            prelude: code that is run in the program's module before it.
            values: source of :mod:`rlhf_plugin_code.values`: arguments and answers of calls are nodes. Empty: JSON.

        Raises RewardError if the program did not start or something outside the sandbox ended it. A cancelled call
        kills the program.
        """
        nonce = secrets.token_hex(16)
        setup = {"nonce": nonce, "program": program, "calls": calls, "prelude": prelude, "values": values}
        header = repr({**self._header, **setup})
        answer = await self._alive().ask({"header": header, "input": stdin})
        out, err = answer["out"], answer["err"].strip()
        begun, mark, rest = out.partition("\n")
        if answer["end"] in ("failed", "cancelled") or not mark or begun != nonce:
            reason = err[-500:] or f"it ended with status {answer['code']} after {answer['seconds']:.1f} s"
            raise RewardError(f"reward 'code': the sandbox {self.sandbox!r} did not start a program: {reason}")
        # bwrap reports a signal that ended the program as 128 + its number, so a negative code is its own end
        if self.sandbox == "bwrap" and answer["end"] == "exit" and answer["code"] < 0:
            raise RewardError(f"reward 'code': signal {-answer['code']} from outside ended the program 'bwrap'")
        return Finished(answer["end"], answer["code"], answer["seconds"], rest, err, nonce)

    def close(self) -> None:
        """Kill all programs and end the launcher process."""
        with self._lock:
            if self._process is not None:
                self._process.close()
            self._process = None

    def _alive(self) -> _Process:
        with self._lock:
            if self._process is None or self._process.dead:
                self._process = _Process(self._settings)
            return self._process


class _Process:
    """The launcher process, and the requests that it has not answered."""

    def __init__(self, settings: dict[str, Any]) -> None:
        environment = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
        # -P: a file of the working folder must not replace a module of this process
        command = [sys.executable, "-P", "-m", "rlhf_plugin_code.launcher_process"]
        # its own session, so that an interrupt from the terminal reaches only the run
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, start_new_session=True
        )
        self._process, self._waiting = process, dict[int, Future[dict[str, Any]]]()
        self._numbers, self._writing = count(), threading.Lock()
        self.dead = False
        self.close = weakref.finalize(self, _end, process)
        threading.Thread(target=_read, args=(weakref.ref(self), process), daemon=True).start()
        self._send(settings)

    async def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        future: Future[dict[str, Any]] = Future()
        number = next(self._numbers)
        self._waiting[number] = future
        try:
            # in a thread, because a full pipe blocks
            await asyncio.to_thread(self._send, {"id": number, **request})
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            self._send({"cancel": number})
            raise

    def _send(self, message: dict[str, Any]) -> None:
        line = json.dumps(message).encode() + b"\n"
        try:
            with self._writing:
                assert self._process.stdin is not None
                self._process.stdin.write(line)
                self._process.stdin.flush()
        except (OSError, ValueError):  # the process died, or was closed
            self.fail()

    def answered(self, answer: dict[str, Any]) -> None:
        future = self._waiting.pop(answer["id"], None)
        if future is not None:
            with contextlib.suppress(InvalidStateError):  # cancelled
                future.set_result(answer)

    def fail(self) -> None:
        """End every waiting request with an error, because the launcher process has ended."""
        self.dead = True
        for number in list(self._waiting):
            future = self._waiting.pop(number, None)
            if future is not None:
                with contextlib.suppress(InvalidStateError):
                    future.set_exception(RewardError("reward 'code': the process that starts programs has ended"))


def _read(process: weakref.ref[_Process], child: subprocess.Popen[bytes]) -> None:
    assert child.stdout is not None
    with child.stdout:
        for line in child.stdout:
            if (owner := process()) is not None:
                owner.answered(json.loads(line))
            del owner
    if (owner := process()) is not None:
        owner.fail()


def _end(child: subprocess.Popen[bytes]) -> None:
    assert child.stdin is not None
    with contextlib.suppress(OSError):
        child.stdin.close()
    try:
        child.wait(10)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
