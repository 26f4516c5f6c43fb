"""Exceptions of a worker, in the form in which they are sent to the driver and raised there."""

from __future__ import annotations

import time
import traceback
from dataclasses import dataclass, field

from rlhf import errors
from rlhf.errors import RlhfError


class RemoteTraceback(Exception):
    """The traceback in the worker. It is the cause of the error that the driver raises."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return f"\n{self.text}"


@dataclass(frozen=True, slots=True)
class Failure:
    """An exception of a worker's method. Exceptions of :mod:`rlhf.errors` keep their class."""

    kind: str
    """Name of the class in :mod:`rlhf.errors`; empty for any other class."""
    message: str
    trace: str
    timestamp: float = field(default_factory=time.time)
    """Seconds since the epoch by the worker's clock; tells which of several ranks failed first."""

    @classmethod
    def of(cls, error: Exception) -> Failure:
        # The driver creates the error again by the name of its class, so the class must be one of the core.
        kind = next(
            (c for c in type(error).__mro__ if issubclass(c, RlhfError) and c.__module__ == errors.__name__), None
        )
        trace = "".join(traceback.format_exception(error)).rstrip()
        if kind is None:
            return cls("", f"{type(error).__name__}: {error}" if str(error) else type(error).__name__, trace)
        return cls(kind.__name__, str(error), trace)

    def error(self, label: str, method: str, default: type[RlhfError]) -> RlhfError:
        """The exception to raise on the driver, with the worker's traceback as its cause."""
        if self.kind:
            raised = getattr(errors, self.kind)(f"{label}: {self.message}")
        else:
            raised = default(f"{label}: {method}() raised {self.message}")
        raised.__cause__ = RemoteTraceback(self.trace)
        return raised
