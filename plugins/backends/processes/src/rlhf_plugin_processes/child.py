"""One worker process as the driver calls it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

from rlhf_workers.driver.calls import CallFailed
from rlhf_workers.driver.handle import WorkerHandle

from rlhf_plugin_processes.channel import ASK, BESIDE, FAILED, ITEM, ITEMS, ROOM, Channel, Message
from rlhf_plugin_processes.references import ProcessCalls, Reference, Stream
from rlhf_plugin_processes.shared_values import Descriptor, SharedValue

_FOLDER = Path(__file__).parent
_END_SECONDS = 30.0
"""Time for a supervisor to end its worker with all descendants."""


class Child(WorkerHandle):
    """A worker process with its supervisor (:mod:`rlhf_plugin_processes.supervisor`). A thread reads its messages."""

    def __init__(
        self, name: str, calls: ProcessCalls, env: Mapping[str, str], devices: Sequence[str] | None, log: Descriptor
    ) -> None:
        """
        Args:
            env: environment variables beside those of the driver.
            devices: ids of the visible GPUs; None where there are no GPUs.
            log: where its output goes. It is kept open, because the message about the worker's death ends with it.
        """
        super().__init__(name)
        self._calls, self._log = calls, log
        self._numbers = count()
        self._guard = threading.Lock()
        self._waiting: dict[int, Reference | Stream] = {}
        """Calls that have not ended."""
        self._death: CallFailed | None = None
        ours, theirs = socket.socketpair()
        with theirs:
            number = theirs.fileno()
            worker = [sys.executable, "-P", str(_FOLDER / "worker_program.py"), str(number)]
            if devices is not None:
                env = {**env, "CUDA_VISIBLE_DEVICES": ",".join(devices)}
            self._supervisor = subprocess.Popen(
                [sys.executable, "-I", "-S", str(_FOLDER / "supervisor.py"), str(os.getpid()), str(number), *worker],
                stdin=subprocess.DEVNULL,
                stdout=log.number,
                stderr=log.number,
                env={**os.environ, **env},
                pass_fds=[number],
                start_new_session=True,  # the keys of a terminal (Ctrl-C) reach only the driver
            )
        start = {"name": name, "env": dict(env), "devices": devices, "path": [os.path.abspath(p) for p in sys.path]}
        with suppress(OSError):  # it is dead already, which the reading thread reports
            ours.sendall(json.dumps(start).encode() + b"\n")
        self._channel = Channel(ours)
        threading.Thread(target=self._read, name=f"messages of {name}", daemon=True).start()

    def ask(self, method: str, *arguments: Any) -> Reference:
        reference = Reference()
        self._send(reference, ASK, (method, arguments))
        return reference

    def items(self, method: str, *arguments: Any, ahead: int | None = None) -> Stream:
        number = next(self._numbers)

        def taken() -> None:
            if ahead is not None:
                with suppress(OSError):
                    self._channel.send(Message(number, ROOM, _NOTHING))

        stream = Stream(self._calls, taken)
        self._send(stream, ITEMS, (method, arguments, ahead), number)
        return stream

    def beside(self, method: str) -> Reference:
        reference = Reference()
        self._send(reference, BESIDE, (method, ()))
        return reference

    def on_its_node(self, function: Callable[..., str], *arguments: Any) -> str:
        return function(*arguments)

    def kill(self) -> None:
        """Returns when the process and all its descendants are gone."""
        if self._supervisor.poll() is None:
            self._supervisor.send_signal(signal.SIGTERM)
        try:
            self._supervisor.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:  # a process waits in the kernel; it ends when the kernel lets it
            self._supervisor.kill()

    def _send(self, answer: Reference | Stream, kind: str, content: Any, number: int | None = None) -> None:
        number = next(self._numbers) if number is None else number
        with self._guard:
            death = self._death
            if death is None:
                self._waiting[number] = answer
        if death is not None:
            self._fail(answer, death)
            return
        with suppress(OSError):  # it is dead, which the reading thread reports
            self._channel.send(Message(number, kind, SharedValue.of(content)))

    def _read(self) -> None:
        while (message := self._channel.receive()) is not None:
            answer = self._waiting[message.call] if message.kind == ITEM else self._waiting.pop(message.call)
            if message.kind == FAILED:
                text, trace = message.value.value()
                self._fail(answer, CallFailed(text, died=False, trace=trace))
            elif isinstance(answer, Reference):
                self._calls.settle(answer, message.value)
            elif message.kind == ITEM:
                self._calls.append(answer, message.value)
            else:
                self._calls.end(answer)
        self._channel.close()
        status = self._supervisor.wait()
        with self._guard:
            self._death = CallFailed(_exit_cause(status), died=True)
            lost, self._waiting = self._waiting, {}
        for answer in lost.values():
            self._fail(answer, self._death)

    def _fail(self, answer: Reference | Stream, error: CallFailed) -> None:
        if isinstance(answer, Reference):
            self._calls.settle(answer, error)
        else:
            self._calls.append(answer, error)
            self._calls.end(answer)


_NOTHING = SharedValue.of(None)


def _exit_cause(status: int) -> str:
    """``status``: as :attr:`subprocess.Popen.returncode` has it."""
    if status == -signal.SIGKILL:
        return "its process was killed by SIGKILL: by somebody, or by the kernel when memory ran out (`dmesg` shows it)"
    if status < 0:
        with suppress(ValueError):
            return f"its process was ended by {signal.Signals(-status).name}"
    return f"its process ended with exit code {status}"
