"""The driver's handle of one worker process: starts and calls it."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

from rlhf.children import Child
from rlhf_workers.driver.calls import CallFailed
from rlhf_workers.driver.handle import WorkerHandle

from rlhf_plugin_processes.call_references import CallReference, ProcessCalls, ReferenceStream
from rlhf_plugin_processes.channel import ASK, FAILED, ITEM, ITEMS, ROOM, SIDE_CALL, Channel, Message
from rlhf_plugin_processes.shared_values import Descriptor, SharedValue

_PROGRAM = Path(__file__).parent / "worker_program.py"
_END_SECONDS = 30.0
"""Time for the end of a worker and all its descendants."""
_NONE_VALUE = SharedValue.of(None)


class WorkerProcess(WorkerHandle):
    """The worker ends when this process ends (:mod:`rlhf.children`). A thread reads its answers."""

    def __init__(
        self, name: str, calls: ProcessCalls, env: Mapping[str, str], devices: Sequence[str] | None, log: Descriptor
    ) -> None:
        """
        Args:
            env: environment variables in addition to the driver's.
            devices: ids of the visible GPUs; None if there are no GPUs.
            log: file for the worker's output. It is kept open, because the message about the worker's death ends with
                it.
        """
        super().__init__(name)
        self._calls, self._log = calls, log
        variables = {**os.environ, **env}
        if devices is not None:
            variables["CUDA_VISIBLE_DEVICES"] = ",".join(devices)
        end, workers_end = socket.socketpair()
        with workers_end:
            number = workers_end.fileno()
            # -P keeps this folder off the import path, where its modules, such as channel.py, could hide others.
            program = [sys.executable, "-P", str(_PROGRAM), str(number)]
            self._child = Child(program, stdout=log.number, stderr=log.number, pass_fds=[number], env=variables)
        path = [os.path.abspath(p) for p in sys.path]
        start = {"name": name, "env": dict(env), "devices": devices, "path": path}
        with suppress(OSError):  # it is already dead, which the reading thread reports
            end.sendall(json.dumps(start).encode() + b"\n")
        self._numbers = count()
        self._guard = threading.Lock()
        self._waiting: dict[int, CallReference | ReferenceStream] = {}
        """Calls that have not ended."""
        self._death: CallFailed | None = None
        self._channel = Channel(end)
        threading.Thread(target=self._read, name=f"messages of {name}", daemon=True).start()

    def ask(self, method: str, *arguments: Any) -> CallReference:
        return self._question(ASK, method, arguments)

    def side_call(self, method: str) -> CallReference:
        return self._question(SIDE_CALL, method, ())

    def items(self, method: str, *arguments: Any, queue_size: int | None = None) -> ReferenceStream:
        number = next(self._numbers)

        def make_room() -> None:
            if queue_size is not None:
                self._send(Message(number, ROOM, _NONE_VALUE))

        stream = ReferenceStream(self._calls, make_room)
        self._begin(stream, number, ITEMS, (method, arguments, queue_size))
        return stream

    def on_its_node(self, function: Callable[..., str], *arguments: Any) -> str:
        return function(*arguments)

    def kill(self) -> None:
        """Kill the process. Returns when it and all its descendants have ended."""
        self._child.end()
        self._child.ends_within(_END_SECONDS)  # a process may wait in the kernel for longer

    # ---------------------------------------------------------------------------------- messages

    def _question(self, kind: str, method: str, arguments: tuple[Any, ...]) -> CallReference:
        reference = CallReference()
        self._begin(reference, next(self._numbers), kind, (method, arguments))
        return reference

    def _begin(self, answer: CallReference | ReferenceStream, number: int, kind: str, content: Any) -> None:
        # Under the lock, because the reading thread fails all waiting calls once, when the worker has died.
        with self._guard:
            death = self._death
            if death is None:
                self._waiting[number] = answer
        if death is None:
            self._send(Message(number, kind, SharedValue.of(content)))
        else:
            self._fail(answer, death)

    def _send(self, message: Message) -> None:
        with suppress(OSError):  # the worker is dead, which the reading thread reports
            self._channel.send(message)

    def _read(self) -> None:
        while (message := self._channel.receive()) is not None:
            answer = self._waiting[message.call] if message.kind == ITEM else self._waiting.pop(message.call)
            if message.kind == FAILED:
                text, trace = message.value.value()
                self._fail(answer, CallFailed(text, died=False, trace=trace))
            elif isinstance(answer, CallReference):
                self._calls.settle(answer, message.value)
            elif message.kind == ITEM:
                self._calls.append(answer, message.value)
            else:
                self._calls.end(answer)
        self._channel.close()
        cause = _exit_cause(self._child.wait())
        with self._guard:
            self._death = CallFailed(cause, died=True)
            lost, self._waiting = self._waiting, {}
        for answer in lost.values():
            self._fail(answer, self._death)

    def _fail(self, answer: CallReference | ReferenceStream, error: CallFailed) -> None:
        if isinstance(answer, CallReference):
            self._calls.settle(answer, error)
        else:
            self._calls.append(answer, error)
            self._calls.end(answer)


def _exit_cause(status: int) -> str:
    """``status``: value of :attr:`subprocess.Popen.returncode`."""
    if status == -signal.SIGKILL:
        return "its process was killed by SIGKILL: by a user, or by the kernel when memory ran out (`dmesg` shows it)"
    if status < 0:
        with suppress(ValueError):
            return f"its process was ended by {signal.Signals(-status).name}"
    return f"its process ended with exit code {status}"
