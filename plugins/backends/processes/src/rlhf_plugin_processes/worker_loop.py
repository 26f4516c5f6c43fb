"""The main loop of a worker process: it runs the driver's calls, one at a time, on its main thread.

A second thread reads messages and answers ``pulse`` and ``stacks`` at once. Importing this module does not import
torch, because the number of threads must be set first.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from queue import SimpleQueue
from typing import Any

from rlhf.supervisor import ignore_stops
from rlhf_workers.process.worker import Worker

from rlhf_plugin_processes.channel import ANSWER, ASK, END, FAILED, ITEM, LOOPBACK, ROOM, SIDE_CALL, Channel, Message
from rlhf_plugin_processes.shared_values import SharedValue


class ProcessWorker(Worker):
    def address(self) -> str:
        return LOOPBACK


class WorkerLoop:
    """Serves one driver until it closes its end."""

    def __init__(self, end: socket.socket, name: str, env: Mapping[str, str], devices: Sequence[str] | None) -> None:
        self.worker, self.channel = ProcessWorker(name, os.getcwd(), env, devices), Channel(end)
        self._calls: SimpleQueue[Message] = SimpleQueue()
        self._room: dict[int, threading.Semaphore] = {}
        """{call: number of further items that may wait for their reader}, for streams with a limit."""

    def run(self) -> None:
        ignore_stops()
        threading.Thread(target=self._read, name="messages", daemon=True).start()
        while True:
            message = self._calls.get()
            try:
                if message.kind == ASK:
                    self._answer(message)
                else:
                    self._stream(message)
            except Exception as error:  # outside of the component: arguments or results that cannot be sent
                with suppress(OSError):  # the driver has ended, and this process will, too
                    self._send(message.call, FAILED, (repr(error), traceback.format_exc()))

    def _read(self) -> None:
        while (message := self.channel.receive()) is not None:
            if message.kind == ROOM:
                if (room := self._room.get(message.call)) is not None:  # None: the stream has ended
                    room.release()
            elif message.kind == SIDE_CALL:
                self._answer(message)
            else:
                self._calls.put(message)
        sys.stderr.flush()
        os._exit(1)  # the driver has ended

    def _answer(self, message: Message) -> None:
        method, arguments = message.value.value()
        self._send(message.call, ANSWER, getattr(self.worker, method)(*_plain(arguments)))

    def _stream(self, message: Message) -> None:
        method, arguments, queue_size = message.value.value()
        items, end = iter(getattr(self.worker, method)(*_plain(arguments))), object()
        room = None if queue_size is None else threading.Semaphore(queue_size)
        if room is not None:
            self._room[message.call] = room
        while True:
            # Wait before the item is computed, so that it does not occupy memory while it waits for its reader.
            if room is not None:
                room.acquire()
            if (item := next(items, end)) is end:
                break
            self._send(message.call, ITEM, item)
        self._room.pop(message.call, None)
        self._send(message.call, END, None)

    def _send(self, call: int, kind: str, value: Any) -> None:
        self.channel.send(Message(call, kind, SharedValue.of(value)))


def _plain(arguments: Sequence[Any]) -> list[Any]:
    """The arguments, with handles replaced by their values."""
    return [argument.value() if isinstance(argument, SharedValue) else argument for argument in arguments]
