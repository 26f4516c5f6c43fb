"""Failed calls: which of several failures was the first, and the error to raise for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlhf.errors import RlhfError, WorkerError

from rlhf_workers.driver.calls import CallFailed, Calls
from rlhf_workers.driver.handle import WorkerHandle
from rlhf_workers.process.failure import Failure, RemoteTraceback

GRACE_SECONDS = 3.0
"""How long the driver waits for the other ranks to fail or end after one rank failed. A launcher may need a second to
notice a death. Another rank may notice it earlier, as a broken connection."""


@dataclass(frozen=True, slots=True)
class FailedCall:
    """What a worker returned instead of a result."""

    member: WorkerHandle
    cause: Failure | CallFailed

    @property
    def died(self) -> bool:
        return isinstance(self.cause, CallFailed) and self.cause.died

    @property
    def order(self) -> tuple[bool, float]:
        """Sort key. Deaths come first, because errors of other ranks follow from them; then by time."""
        return not self.died, getattr(self.cause, "timestamp", 0.0)

    def error(self, method: str, default: type[RlhfError]) -> RlhfError:
        """The exception to raise. Its class is ``default`` if the original is not from :mod:`rlhf.errors`."""
        label = f"{self.member.name} ({self.member.location})"
        if isinstance(self.cause, Failure):
            return self.cause.error(label, method, default)
        if self.cause.died:
            return WorkerError(self.member.death(self.cause, f"{method}()"))
        raised = default(f"{label}: {method}() failed: {self.cause}")  # outside of Worker's methods: not unpickled
        raised.__cause__ = RemoteTraceback(self.cause.trace)
        return raised


def result_of(calls: Calls, member: WorkerHandle, ref: Any) -> Any:
    """The result of a finished call, or a :class:`FailedCall`."""
    try:
        result = calls.get(ref)
    except CallFailed as error:
        return FailedCall(member, error)
    return FailedCall(member, result) if isinstance(result, Failure) else result


def first_failure(
    calls: Calls, failed: FailedCall, waiting: Mapping[Any, WorkerHandle]
) -> tuple[FailedCall, list[WorkerHandle]]:
    """Wait some seconds after one of several workers failed. Returns (the first cause, workers that still hang).

    Args:
        waiting: {reference: worker} of the workers without an answer.
    """
    if not waiting:
        return failed, []
    ready, hanging = calls.wait(list(waiting), len(waiting), GRACE_SECONDS)
    answers = [failed, *(result_of(calls, waiting[ref], ref) for ref in ready)]
    failures = [a for a in answers if isinstance(a, FailedCall)]
    return min(failures, key=lambda t: t.order), [waiting[ref] for ref in hanging]
