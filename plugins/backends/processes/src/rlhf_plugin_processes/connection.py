"""The driver's end of a channel: calls that wait for their answers."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from typing import Any

from rlhf_workers.driver.calls import CallFailed

from rlhf_plugin_processes.channel import FAILED, ITEM, ITEMS, ROOM, Channel, Message
from rlhf_plugin_processes.references import ProcessCalls, Reference, Stream
from rlhf_plugin_processes.shared_values import SharedValue


class Connection:
    """Calls to one process. A thread reads its answers."""

    def __init__(self, name: str, end: socket.socket, calls: ProcessCalls, cause: Callable[[], str]) -> None:
        """
        Args:
            name: of the other process.
            cause: returns why the other process ended, once its end of the channel is closed.
        """
        self._calls, self._cause = calls, cause
        self._numbers = count()
        self._guard = threading.Lock()
        self._waiting: dict[int, Reference | Stream] = {}
        """Calls that have not ended."""
        self._death: CallFailed | None = None
        self._channel = Channel(end)
        threading.Thread(target=self._read, name=f"messages of {name}", daemon=True).start()

    def ask(self, kind: str, *content: Any) -> Reference:
        """A call with one answer: ``kind`` is ``ASK`` or ``BESIDE``."""
        reference = Reference()
        self._send(reference, kind, content, next(self._numbers))
        return reference

    def items(self, method: str, arguments: tuple[Any, ...], ahead: int | None) -> Stream:
        number = next(self._numbers)

        def make_room() -> None:
            if ahead is not None:
                self.tell(ROOM, number)

        stream = Stream(self._calls, make_room)
        self._send(stream, ITEMS, (method, arguments, ahead), number)
        return stream

    def tell(self, kind: str, number: int = 0) -> None:
        """A message without an answer."""
        with suppress(OSError):  # the other process is dead, which the reading thread reports
            self._channel.send(Message(number, kind, _NOTHING))

    def _send(self, answer: Reference | Stream, kind: str, content: Any, number: int) -> None:
        with self._guard:
            death = self._death
            if death is None:
                self._waiting[number] = answer
        if death is not None:
            self._fail(answer, death)
            return
        with suppress(OSError):  # the other process is dead, which the reading thread reports
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
        cause = self._cause()
        with self._guard:
            self._death = CallFailed(cause, died=True)
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
