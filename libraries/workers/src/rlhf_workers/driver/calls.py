"""How the driver waits for workers and reads their answers. Each launcher implements it for its own processes.

A *reference* stands for the answer of one call. A *stream* is an iterator over references to the items of one call.
Both are opaque here; :meth:`Calls.wait` takes them mixed.
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
            message: why, on one line.
            died: whether the process is gone.
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
        """(ready, not ready) references and streams, as soon as ``count`` are ready or after ``timeout`` seconds. At
        most ``count`` are in the first list. A call that failed is ready too, and so is a stream that ended."""

    @abstractmethod
    def get(self, ref: Any) -> Any:
        """The answer, which is waited for. Raises CallFailed."""

    @abstractmethod
    def put(self, payload: Payload) -> Stored:
        """Store the arguments of a call, once for all ranks."""

    def send(self, payload: Payload | None) -> Any:
        """The argument for a worker's method: a small payload itself, a handle of a large one in the store."""
        return payload if payload is None or payload.nbytes < INLINE else self.put(payload)

    @abstractmethod
    def stored(self, ref: Any) -> Stored:
        """A handle of the value that a reference from a stream stands for."""

    @property
    @abstractmethod
    def connected(self) -> bool:
        """Whether workers can be called at all."""
