"""How the driver waits for workers and reads their answers. Each launcher implements this interface for its processes.

A *reference* stands for the answer of one call. A *stream* is an iterator over references to the items of one call.
Both are opaque here. :meth:`Calls.wait` accepts a mix of both.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from rlhf_workers.process.payload import INLINE, Payload, Stored


class CallFailed(Exception):
    """A call has no answer: its process died, or the call could not be delivered."""

    def __init__(self, message: str, died: bool, trace: str = "") -> None:
        """
        Args:
            message: the cause, on one line.
            died: whether the process ended.
            trace: the traceback in the worker, if there is one.
        """
        super().__init__(message)
        self.died, self.trace = died, trace


class Calls(ABC):
    """The driver's connection to all workers of one launcher."""

    host: str
    """The address of this machine at which workers reach the driver."""

    @abstractmethod
    def wait(
        self, waitables: Sequence[Any], count: int = 1, timeout: float | None = None
    ) -> tuple[list[Any], list[Any]]:
        """Wait until ``count`` references or streams are ready, or for ``timeout`` seconds. Returns (ready, not ready);
        the first list has at most ``count``. Failed calls and ended streams count as ready."""

    @abstractmethod
    def get(self, ref: Any) -> Any:
        """Wait for the answer and return it. Raises CallFailed."""

    @abstractmethod
    def put(self, payload: Payload) -> Stored:
        """Store the arguments of a call, once for all ranks."""

    def send(self, payload: Payload | None) -> Any:
        """The argument for a worker's method: a small payload itself, or a handle of a large payload in the store."""
        return payload if payload is None or payload.nbytes < INLINE else self.put(payload)

    @abstractmethod
    def stored(self, ref: Any) -> Stored:
        """A handle of the value behind a reference from a stream."""

    @property
    @abstractmethod
    def connected(self) -> bool:
        """Whether workers can be called at all."""
