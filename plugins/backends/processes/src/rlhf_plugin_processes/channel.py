"""Messages between the driver and a worker process, over a pair of Unix sockets. They can carry file descriptors."""

from __future__ import annotations

import pickle
import socket
import struct
import threading
from dataclasses import dataclass

from rlhf_plugin_processes.shared_values import Descriptor, SharedValue

LOOPBACK = "127.0.0.1"
"""The address of ranks, engines and the driver. Other machines cannot reach the loopback interface."""

ASK, ITEMS, SIDE_CALL, ROOM = "ask", "items", "side_call", "room"
"""Kinds of messages to a worker: a call; a call of a generator method; a call beside another call; the notice that an
item of a stream was read."""
ANSWER, ITEM, END, FAILED = "answer", "item", "end", "failed"
"""Kinds of messages from a worker: a result; an item of a stream; the end of a stream; (message, traceback) of a call
that could not be read or answered."""

_HEADER = struct.Struct("!QI")
"""Bytes of the message, number of file descriptors."""
_BATCH = 200
"""Maximum number of file descriptors per packet; Linux allows 253."""


@dataclass(frozen=True, slots=True)
class Message:
    call: int
    """Number of the call."""
    kind: str
    value: SharedValue


class Channel:
    """One end of the channel. Any thread may send; only one thread receives."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._sending = threading.Lock()

    def send(self, message: Message) -> None:
        """Send a message. Raises OSError if the other end is closed."""
        value = message.value
        descriptors = list(value.children)
        content: bytes | None = None
        if isinstance(value.content, bytes):
            content = value.content
        else:
            descriptors.append(value.content)
        data = pickle.dumps((message.call, message.kind, value.sizes, content))
        numbers = [descriptor.number for descriptor in descriptors]
        with self._sending:
            self._end.sendall(_HEADER.pack(len(data), len(numbers)))
            for start in range(0, len(numbers), _BATCH):
                # Linux passes descriptors over a stream socket only together with at least one byte.
                socket.send_fds(self._end, [b"f"], numbers[start : start + _BATCH])
            self._end.sendall(data)

    def receive(self) -> Message | None:
        """The next message; None if the other end is closed."""
        try:
            size, count = _HEADER.unpack(self._exactly(_HEADER.size))
            descriptors: list[Descriptor] = []
            while len(descriptors) < count:
                _, numbers, _, _ = socket.recv_fds(self._end, 1, min(_BATCH, count - len(descriptors)))
                if not numbers:
                    return None
                descriptors += map(Descriptor, numbers)
            call, kind, sizes, content = pickle.loads(self._exactly(size))
        except OSError:
            return None
        if content is None:
            return Message(call, kind, SharedValue(sizes, descriptors[-1], descriptors[:-1]))
        return Message(call, kind, SharedValue(sizes, content, descriptors))

    def _exactly(self, nbytes: int) -> bytes:
        data = bytearray(nbytes)
        view, filled = memoryview(data), 0
        while filled < nbytes:
            count = self._end.recv_into(view[filled:])
            if not count:
                raise ConnectionError("the other process closed its end")
            filled += count
        return bytes(data)

    def close(self) -> None:
        self._end.close()
