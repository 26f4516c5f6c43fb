"""The ranks of one role, as the controller calls them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError
from rlhf.errors import CapabilityError, RlhfError, TrainingError, WorkerError
from rlhf.interfaces import WorkerGroup

from rlhf_plugin_ray.failure import Failure, RemoteTraceback
from rlhf_plugin_ray.member import Member
from rlhf_plugin_ray.parcel import pack, send, unpack
from rlhf_plugin_ray.vigil import Vigil

GRACE_SECONDS = 3.0
"""After a rank failed: for the others to fail or end too, before they are given up. Ray needs about one to notice a
death, which a neighbour may feel earlier as a broken connection."""
_AHEAD = 2
"""Objects of a stream that lie in the store unclaimed: an item and its mark. Another item is being taken meanwhile."""


@dataclass(frozen=True, slots=True)
class _Trouble:
    """What one rank answered in place of a result."""

    member: Member
    what: Failure | RayError

    @property
    def order(self) -> tuple[bool, float]:
        """Deaths first: what neighbours raise is their consequence. Then by time."""
        return isinstance(self.what, Failure), getattr(self.what, "at", 0.0)

    def error(self, doing: str) -> RlhfError:
        if isinstance(self.what, Failure):
            return self.what.error(f"{self.member.name} ({self.member.where})", doing, TrainingError)
        if isinstance(self.what, RayTaskError):  # before or after our own code: arguments that cannot be unpacked
            raised = TrainingError(f"{self.member.name} ({self.member.where}): {doing}() failed: {self.what.cause!r}")
            raised.__cause__ = RemoteTraceback(str(self.what))
            return raised
        return WorkerError(self.member.death(self.what, f"{doing}()"))


class RayGroup(WorkerGroup):
    """One actor per rank."""

    def __init__(self, role: str, members: Sequence[Member], watch: Callable[[Sequence[Member], str], Vigil]) -> None:
        self.role, self.members, self.size = role, list(members), len(members)
        self._watch = watch
        self._broken = ""
        self._open: tuple[str, Any] | None = None
        """(method, items) of a stream that nobody has read to its end; rank 0 waits for room in the store."""

    def call(self, method: str, per_rank: Sequence[tuple[Any, ...]]) -> list[Any]:
        """All ranks' arguments are one object in the store. Where a rank fails, its error is raised without waiting for
        others that wait for it; the group is then of no more use."""
        if len(per_rank) != self.size:
            raise CapabilityError(
                f"{self.role} has {self.size} ranks; {method}() was called with arguments for {len(per_rank)}"
            )
        self._check_usable(method)
        parcel = send(pack(per_rank))
        answers = {m.handle.call.remote(method, parcel, rank): m for rank, m in enumerate(self.members)}
        return [unpack(result)[0] for result in self._collect(method, answers)]

    def stream(self, method: str, *arguments: Any, timeout: float | None = None) -> Iterator[Any]:
        """References to what rank 0 yields: the values stay in the store, for other groups and for engines to take."""
        self._check_usable(method)
        parcel = send(pack([arguments]))
        source, others = self.members[0], self.members[1:]
        options = {"num_returns": "streaming", "_generator_backpressure_num_objects": _AHEAD}
        items = source.handle.stream.options(**options).remote(method, parcel, 0)
        answers = {m.handle.drain.remote(method, parcel, 0): m for m in others}
        self._open = method, items
        while (item := self._next(method, items, answers, timeout)) is not None:
            yield item
            del item
        self._open = None
        self._collect(method, answers)

    def shutdown(self) -> None:
        """End the processes."""
        self._broken = self._broken or "it was shut down"
        for member in self.members:
            member.kill()

    # -------------------------------------------------------------------------------------- parts

    def _check_usable(self, method: str) -> None:
        if not self._broken and self._open is not None:  # its reader failed, or wanted no more
            (started, items), self._open = self._open, None
            with self._watching(started, self.members[:1]) as vigil:
                while vigil.wait([items]) and next(items, None) is not None:
                    pass
        if self._broken:
            raise WorkerError(f"{self.role}: {method}() cannot be called any more: {self._broken}")

    @contextmanager
    def _watching(self, method: str, members: Sequence[Member]) -> Iterator[Vigil]:
        try:
            yield self._watch(members, f"{self.role}.{method}()")
        except WorkerError as error:  # a stall, or a death
            self._broken = self._broken or str(error).splitlines()[0]
            raise

    def _collect(self, method: str, answers: dict[Any, Member]) -> list[Any]:
        """The answers in rank order, or the first cause of what went wrong."""
        waiting, results = dict(answers), {}
        with self._watching(method, list(waiting.values())) as vigil:
            while waiting:
                for ref in vigil.wait(list(waiting)):
                    member = waiting.pop(ref)
                    vigil.leave(member)
                    results[ref] = _answer(member, ref)
                    if isinstance(results[ref], _Trouble):
                        raise self._first_cause(method, results[ref], waiting)
        return [results[ref] for ref in answers]

    def _first_cause(self, method: str, trouble: _Trouble, waiting: Mapping[Any, Member]) -> RlhfError:
        troubles, hanging = [trouble], list(waiting)
        if waiting:
            ready, hanging = ray.wait(list(waiting), num_returns=len(waiting), timeout=GRACE_SECONDS)
            troubles += [a for a in (_answer(waiting[ref], ref) for ref in ready) if isinstance(a, _Trouble)]
        first = min(troubles, key=lambda t: t.order)
        error = first.error(method)
        if hanging:
            names = ", ".join(waiting[ref].name for ref in hanging)
            self._broken = f"{names} did not come back from {method}() after a failure: {str(error).splitlines()[0]}"
        elif not isinstance(first.what, Failure):
            self._broken = str(error).splitlines()[0]
        return error

    def _next(self, method: str, items: Any, answers: Mapping[Any, Member], timeout: float | None) -> Any | None:
        """The next item of the stream, or None at its end."""
        item = self._advance(method, items, answers, timeout)
        if item is None:
            return None
        mark = self._advance(method, items, answers, timeout)
        # where the rank died, Ray ends the stream with an item that holds the error
        mark = _answer(self.members[0], item if mark is None else mark)
        if isinstance(mark, _Trouble):
            self._open = None
            raise self._first_cause(method, mark, answers)
        return item

    def _advance(self, method: str, items: Any, answers: Mapping[Any, Member], timeout: float | None) -> Any | None:
        source, waiting = self.members[0], dict(answers)
        with self._watching(method, [source]) as vigil:
            while True:
                ready = vigil.wait([items, *waiting], timeout)
                if not ready:
                    self._broken = f"{method}() gave nothing within {timeout:g} s"
                    raise TrainingError(f"{self.role}: {self._broken} ({source.name}, {source.where})")
                if items in ready:
                    return next(items, None)
                for ref in ready:  # another rank has ended; where it failed, rank 0 may wait for it for ever
                    answer = _answer(waiting.pop(ref), ref)
                    if isinstance(answer, _Trouble):
                        raise self._first_cause(method, answer, waiting)


def _answer(member: Member, ref: Any) -> Any:
    """What a finished call returned, or a :class:`_Trouble`."""
    try:
        result = ray.get(ref)
    except RayError as error:
        return _Trouble(member, error)
    return _Trouble(member, result) if isinstance(result, Failure) else result
