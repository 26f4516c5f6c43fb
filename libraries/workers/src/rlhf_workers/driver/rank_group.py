"""The ranks of one role, called by the driver as one group."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rlhf.errors import CapabilityError, RlhfError, TrainingError, WorkerError
from rlhf.interfaces import WorkerGroup

from rlhf_workers.driver.calls import Calls
from rlhf_workers.driver.failures import GRACE_SECONDS, FailedCall, first_failure, result_of
from rlhf_workers.driver.handle import WorkerHandle
from rlhf_workers.driver.watchdog import Watchdog
from rlhf_workers.process.payload import Stored, pack, unpack

_QUEUE_SIZE = 2
"""Unread objects of a stream in the store: an item and the None after it. The reader holds another item."""


class RankGroup(WorkerGroup):
    """One worker process per rank."""

    def __init__(
        self,
        role: str,
        members: Sequence[WorkerHandle],
        calls: Calls,
        watch: Callable[[Sequence[WorkerHandle], str], Watchdog],
    ) -> None:
        self.calls = calls
        self.role, self.members, self.size = role, list(members), len(members)
        self._watch = watch
        self._broken = ""
        self._open: tuple[str, Any, Mapping[Any, WorkerHandle]] | None = None
        """(method, items, answers of the other ranks) of a stream that was not read to its end; its rank 0 waits for
        room in the store."""

    def call(self, method: str, per_rank: Sequence[tuple[Any, ...]]) -> list[Any]:
        """If a rank fails, its error is raised without waiting for ranks that wait for the failed rank in a collective.
        If such a rank hangs, the group cannot be called again."""
        return self.begin(method, per_rank)()

    def begin(self, method: str, per_rank: Sequence[tuple[Any, ...]]) -> Callable[[], list[Any]]:
        """The arguments of all ranks are one object in the store."""
        if len(per_rank) != self.size:
            raise CapabilityError(
                f"{self.role} has {self.size} ranks; {method}() was called with arguments for {len(per_rank)}"
            )
        self.finish_stream(method)
        payload = self.calls.send(pack(per_rank))
        answers = {m.ask("call", method, payload, rank): m for rank, m in enumerate(self.members)}
        return lambda: [unpack(result)[0] for result in self._collect(method, answers)]

    def stream(self, method: str, *arguments: Any, timeout: float | None = None) -> Iterator[Any]:
        """Handles of the items of rank 0. The values stay in the store, for other groups and for engines."""
        self.finish_stream(method)
        payload = self.calls.send(pack([arguments]))
        source, followers = self.members[0], self.members[1:]
        items = source.items("stream", method, payload, 0, queue_size=_QUEUE_SIZE)
        answers = {m.ask("drain", method, payload, 0): m for m in followers}
        self._open = method, items, answers
        while (item := self._next(method, items, answers, timeout)) is not None:
            yield self.calls.stored(item)
            # This reference would keep the item in the store while the next one is computed.
            del item
        self._open = None
        self._collect(method, answers)

    def send_buckets(self, view: str, limit: int, timeout: float | None = None) -> Iterator[Any]:
        """Handles of the buckets in the store. If the ranks are connected to a link: handles of the headers."""
        return self.stream("send_buckets", view, limit, timeout=timeout)

    def value(self, item: Any) -> Any:
        """The value in the store. Its memory is read-only."""
        return type(item).fetch([item])[0] if isinstance(item, Stored) else item

    def peak_memory(self) -> list[dict[str, int]]:
        return self.call("peak_memory", [()] * self.size)

    def finish_stream(self, method: str) -> None:
        """Read an unfinished stream to its end, before ``method`` is called. Raises WorkerError if the ranks cannot be
        called any more, and the error of a rank that failed in the stream while rank 0 may wait for it."""
        # Until its stream ends, rank 0 serves no other call.
        if not self._broken and self._open is not None:  # its reader failed or stopped early
            (started, items, answers), self._open = self._open, None
            while self._advance(started, items, answers, None) is not None:
                pass
        if self._broken:
            raise WorkerError(f"{self.role}: {method}() can no longer be called: {self._broken}")

    def shutdown(self) -> None:
        """End the processes."""
        self._broken = self._broken or "it was shut down"
        for member in self.members:
            member.kill()

    # ------------------------------------------------------------------ waiting for answers and items

    @contextmanager
    def _watching(self, method: str, members: Sequence[WorkerHandle]) -> Iterator[Watchdog]:
        try:
            yield self._watch(members, f"{self.role}.{method}()")
        except WorkerError as error:  # a stall, or a death
            self._broken = self._broken or str(error).splitlines()[0]
            raise

    def _collect(self, method: str, answers: dict[Any, WorkerHandle]) -> list[Any]:
        """The answers in rank order. Raises the first cause of a failure."""
        waiting, results = dict(answers), {}
        with self._watching(method, list(waiting.values())) as watchdog:
            while waiting:
                for ref in watchdog.wait(list(waiting)):
                    member = waiting.pop(ref)
                    watchdog.leave(member)
                    results[ref] = result_of(self.calls, member, ref)
                    if isinstance(results[ref], FailedCall):
                        raise self.first_cause(method, results[ref], waiting)
        return [results[ref] for ref in answers]

    def first_cause(self, method: str, failed: FailedCall, waiting: Mapping[Any, WorkerHandle]) -> RlhfError:
        """The error to raise for a failed rank, while other ranks have not answered yet."""
        first, hanging = first_failure(self.calls, failed, waiting)
        error = first.error(method, TrainingError)
        if hanging:
            self._broken = _stuck(hanging, method, error)
        elif first.died:
            self._broken = str(error).splitlines()[0]
        return error

    def _next(self, method: str, items: Any, answers: Mapping[Any, WorkerHandle], timeout: float | None) -> Any | None:
        """The next item of the stream; None at its end."""
        item = self._advance(method, items, answers, timeout)
        if item is None:
            return None
        mark = self._advance(method, items, answers, timeout)
        # when the rank died, the stream ends with an item that holds the error
        mark = result_of(self.calls, self.members[0], item if mark is None else mark)
        if isinstance(mark, FailedCall):
            self._open = None
            raise self.first_cause(method, mark, answers)
        return item

    def _advance(
        self, method: str, items: Any, answers: Mapping[Any, WorkerHandle], timeout: float | None
    ) -> Any | None:
        source, waiting = self.members[0], dict(answers)
        with self._watching(method, [source, *waiting.values()]) as watchdog:
            while True:
                ready = watchdog.wait([items, *waiting], timeout)
                if not ready:
                    self._broken = f"{method}() returned nothing within {timeout:g} s"
                    raise TrainingError(f"{self.role}: {self._broken} ({source.name}, {source.location})")
                if items in ready:
                    return next(items, None)
                for ref in ready:  # another rank has ended; if it failed, rank 0 may wait for it forever
                    member = waiting.pop(ref)
                    watchdog.leave(member)
                    answer = result_of(self.calls, member, ref)
                    if isinstance(answer, FailedCall):
                        error = self.first_cause(method, answer, waiting)
                        if not self._broken and not _runs_out(self.calls, items):
                            self._broken = _stuck([source], method, error)
                        raise error


def _runs_out(calls: Calls, items: Any) -> bool:
    """Whether a stream ends by itself within a few seconds."""
    end = time.monotonic() + GRACE_SECONDS
    while calls.wait([items], timeout=max(0.0, end - time.monotonic()))[0]:
        if next(items, None) is None:
            return True
    return False


def _stuck(members: Sequence[WorkerHandle], method: str, error: Exception) -> str:
    names = ", ".join(m.name for m in members)
    return f"{names} did not return from {method}() after a failure: {str(error).splitlines()[0]}"
