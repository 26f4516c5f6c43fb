"""References to answers of worker processes, and functions that wait for them."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from rlhf_workers.driver.calls import CallFailed, Calls
from rlhf_workers.process.payload import Payload

from rlhf_plugin_processes.channel import LOOPBACK
from rlhf_plugin_processes.shared_values import SharedValue


class CallReference:
    """The answer of one call, or one item of a stream."""

    def __init__(self, content: SharedValue | CallFailed | None = None) -> None:
        self.content = content
        """The answer; None until it arrives."""

    @property
    def ready(self) -> bool:
        return self.content is not None


class ReferenceStream:
    """An iterator over references to the items of one call. ``next`` waits for the item."""

    def __init__(self, calls: ProcessCalls, on_read: Callable[[], None]) -> None:
        """``on_read`` is called after each item that was read."""
        self._calls, self._on_read = calls, on_read
        self.items: deque[CallReference] = deque()
        self.complete = False

    @property
    def ready(self) -> bool:
        return self.complete or bool(self.items)

    def __iter__(self) -> ReferenceStream:
        return self

    def __next__(self) -> CallReference:
        self._calls.wait([self])
        if not self.items:
            raise StopIteration
        item = self.items.popleft()
        self._on_read()
        return item


class ProcessCalls(Calls):
    """The references of one launcher. Threads that read from workers settle them. Any thread may wait for them."""

    def __init__(self) -> None:
        self.host = LOOPBACK
        self._condition = threading.Condition()

    @property
    def connected(self) -> bool:
        return True

    def wait(
        self, waitables: Sequence[Any], count: int = 1, timeout: float | None = None
    ) -> tuple[list[Any], list[Any]]:
        end = None if timeout is None else time.monotonic() + timeout
        with self._condition:
            while True:
                ready = [waitable for waitable in waitables if waitable.ready][:count]
                seconds = None if end is None else end - time.monotonic()
                if len(ready) >= count or (seconds is not None and seconds <= 0):
                    return ready, [waitable for waitable in waitables if waitable not in ready]
                self._condition.wait(seconds)

    def get(self, ref: CallReference) -> Any:
        self.wait([ref])
        if isinstance(ref.content, SharedValue):
            return ref.content.value()
        assert ref.content is not None
        raise ref.content

    def put(self, payload: Payload) -> SharedValue:
        return SharedValue.of(payload)

    def stored(self, ref: CallReference) -> SharedValue:
        assert isinstance(ref.content, SharedValue)
        return ref.content

    # ------------------------------------------------------------------- from the threads that read

    def settle(self, ref: CallReference, content: SharedValue | CallFailed) -> None:
        """Record the answer of a call."""
        with self._condition:
            ref.content = content
            self._condition.notify_all()

    def append(self, stream: ReferenceStream, item: SharedValue | CallFailed) -> None:
        """Append an item to a stream."""
        with self._condition:
            stream.items.append(CallReference(item))
            self._condition.notify_all()

    def end(self, stream: ReferenceStream) -> None:
        """Mark the end of a stream."""
        with self._condition:
            stream.complete = True
            self._condition.notify_all()
