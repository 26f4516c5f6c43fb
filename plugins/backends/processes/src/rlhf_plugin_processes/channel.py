"""Messages between the driver and another process: over a pair of Unix sockets, or over TCP to another machine.

Between machines the content of shared memory is sent, and the receiver puts the content into shared memory of its own.
"""

from __future__ import annotations

import mmap
import os
import pickle
import socket
import struct
import threading
from dataclasses import dataclass

from rlhf_plugin_processes.shared_values import Descriptor, SharedValue, shared_memory

ASK, ITEMS, BESIDE, ROOM = "ask", "items", "beside", "room"
"""Kinds of messages to a worker: a call; a call of a generator method; a call beside another call; an item of a stream
was read."""
ANSWER, ITEM, END, FAILED = "answer", "item", "end", "failed"
"""Kinds of messages from a worker: a result; an item of a stream; the end of a stream; (message, traceback) of a call
that could not be read or answered."""

_HEADER = struct.Struct("!QI")
"""Bytes of the message, number of file descriptors."""
_SIZE = struct.Struct("!Q")
"""Bytes of the shared memory of one file descriptor."""
_BATCH = 200
"""File descriptors of one packet; Linux allows 253."""


@dataclass(frozen=True, slots=True)
class Message:
    call: int
    """Number of the call."""
    kind: str
    value: SharedValue


class Channel:
    """One end. Any thread may send; one thread receives."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._local = end.family == socket.AF_UNIX
        self._sending = threading.Lock()

    def send(self, message: Message) -> None:
        """Raises OSError if the other end is closed."""
        value = message.value
        descriptors = list(value.inside)
        content: bytes | None = None
        if isinstance(value.content, bytes):
            content = value.content
        else:
            descriptors.append(value.content)
        data = pickle.dumps((message.call, message.kind, value.sizes, content))
        numbers = [descriptor.number for descriptor in descriptors]
        with self._sending:
            self._end.sendall(_HEADER.pack(len(data), len(numbers)))
            if self._local:
                for start in range(0, len(numbers), _BATCH):
                    socket.send_fds(self._end, [b"f"], numbers[start : start + _BATCH])
            else:
                for number in numbers:
                    self._send_content(number)
            self._end.sendall(data)

    def receive(self) -> Message | None:
        """The next message; None if the other end is closed."""
        try:
            size, count = _HEADER.unpack(self._exactly(_HEADER.size))
            descriptors: list[Descriptor] = []
            while len(descriptors) < count:
                if self._local:
                    _, numbers, _, _ = socket.recv_fds(self._end, 1, min(_BATCH, count - len(descriptors)))
                    if not numbers:
                        return None
                    descriptors += map(Descriptor, numbers)
                else:
                    descriptors.append(self._receive_content())
            call, kind, sizes, content = pickle.loads(self._exactly(size))
        except OSError:
            return None
        if content is None:
            return Message(call, kind, SharedValue(sizes, descriptors[-1], descriptors[:-1]))
        return Message(call, kind, SharedValue(sizes, content, descriptors))

    def _send_content(self, number: int) -> None:
        size, position = os.fstat(number).st_size, 0
        self._end.sendall(_SIZE.pack(size))
        while position < size:
            position += os.sendfile(self._end.fileno(), number, position, size - position)

    def _receive_content(self) -> Descriptor:
        [size] = _SIZE.unpack(self._exactly(_SIZE.size))
        descriptor = shared_memory(size)
        with mmap.mmap(descriptor.number, size) as memory, memoryview(memory) as view:
            self._fill(view)
        return descriptor

    def _exactly(self, nbytes: int) -> bytes:
        data = bytearray(nbytes)
        self._fill(memoryview(data))
        return bytes(data)

    def _fill(self, view: memoryview) -> None:
        filled = 0
        while filled < len(view):
            with view[filled:] as rest:
                count = self._end.recv_into(rest)
            if not count:
                raise ConnectionError("the other process closed its end")
            filled += count

    def close(self) -> None:
        self._end.close()
