"""The engines of a generator: calling them together, and replacing dead ones."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Any

from rlhf.errors import RolloutError, SyncError, WorkerError

from rlhf_workers.driver.calls import Calls
from rlhf_workers.driver.failures import FailedCall, result_of
from rlhf_workers.driver.handle import WorkerHandle
from rlhf_workers.driver.watchdog import Watch, Watchdog
from rlhf_workers.process.payload import pack, unpack

_LOG = logging.getLogger(__name__)
_CLOSING = 5.0
"""Seconds for engines to close by themselves. Busy or stalled engines are then killed."""
_HOUR = 3600.0
_FEWEST = 3
"""Number of replacements within an hour that even runs with fewer engines have."""
_LOADING = frozenset({"begin_load", "take", "end_load", "logprobs", "stale", "receivers"})
"""Methods whose failure is a failed weight sync (SyncError)."""


class EngineWorkers:
    """Engines by number. An engine is dead if its process ended or one of its methods raised WorkerError. It is then
    recorded in ``dead`` and not called until :meth:`replace`."""

    def __init__(
        self,
        calls: Calls,
        start: Callable[[Sequence[int]], list[WorkerHandle]],
        watch: Watch,
        engines: int,
        max_restarts: int | None,
        on_failure: Callable[[], None] = lambda: None,
    ) -> None:
        """
        Args:
            start: starts the engines with these numbers. If it raises, none of them is left running.
            max_restarts: limit for all engines together within an hour; None: the number of engines, at least 3.
            on_failure: called when an engine died or failed, because other processes may wait for it.
        """
        self.calls, self._start, self._watch = calls, start, watch
        self._max_restarts = max(_FEWEST, engines) if max_restarts is None else max_restarts
        self._replaced_at: deque[float] = deque()
        """Times of the replacements of the last hour. The limit per hour allows a run of weeks to survive many hardware
        failures. A defect that kills every engine still ends the run."""
        self.dead: dict[int, str] = {}
        """{engine to replace: cause of its death}."""
        self._on_failure = on_failure
        self._posted: dict[Any, tuple[int, str]] = {}
        self._stalled = ""
        """The message about a stalled engine, which ends the run; empty if there is none."""
        self._closed = False
        self.members = dict(enumerate(start(range(engines))))

    def check_open(self) -> None:
        if self._closed:
            raise WorkerError("the engines were shut down")

    def watch(self, numbers: Collection[int], doing: str) -> Watchdog:
        return self._watch([self.members[n] for n in numbers], doing, self.kill_stalled)

    def post(self, method: str, *arguments: Any) -> None:
        """Call a method without waiting. The next :meth:`ask` raises its errors. An earlier post is forgotten."""
        self._posted = self._call(self._alive(), method, arguments)

    def ask(
        self, method: str, *arguments: Any, engines: Collection[int] | None = None, timeout: float | None = None
    ) -> dict[int, Any]:
        """{engine: answer} of the engines that survive the call.

        A SyncError is raised when all engines have answered. It is not raised if an engine died: the death makes the
        sync fail on the other engines too.

        Args:
            timeout: seconds (``sync.timeout``); SyncError if an engine has not answered by then.
        """
        numbers = self._alive(engines)
        last = self._call(numbers, method, arguments)
        waiting, self._posted = self._posted | last, {}
        watchdog = self.watch({n for n, _ in waiting.values()}, f"{method}()")
        answers: dict[int, Any] = {}
        failed: list[SyncError] = []
        end = None if timeout is None else time.monotonic() + timeout
        while waiting:
            ready = watchdog.wait(list(waiting), None if end is None else max(0.0, end - time.monotonic()))
            if not ready:
                late = " and ".join(sorted({f"engine {n}" for n, _ in waiting.values()}))
                self._on_failure()
                raise SyncError(f"{late} did not answer {method}() within {timeout:g} s (sync.timeout)")
            for ref in ready:
                number, called_method = waiting.pop(ref)
                if ref in last:  # an engine answers its calls in order
                    watchdog.leave(self.members[number])
                try:
                    answer = self.answer(number, called_method, ref)
                except SyncError as error:
                    failed.append(error)
                    self._on_failure()  # another engine's death may be the cause
                    continue
                # An engine that answered may be dead all the same, because its posted call raised WorkerError.
                if ref in last and number not in self.dead:
                    answers[number] = unpack(answer)[0]
        if failed and not self.dead:
            raise failed[0]
        return {n: answers[n] for n in numbers if n in answers}

    def begin(self, number: int, method: str, *arguments: Any) -> Any:
        """Call a method of one engine without waiting. Returns the reference for :meth:`answer`."""
        [ref] = self._call([number], method, arguments)
        return ref

    def _alive(self, engines: Collection[int] | None = None) -> list[int]:
        return [n for n in (self.members if engines is None else engines) if n not in self.dead]

    def _call(self, numbers: Collection[int], method: str, arguments: tuple[Any, ...]) -> dict[Any, tuple[int, str]]:
        """{reference: (engine, method)}."""
        self.check_open()
        payload = self.calls.send(pack([arguments]))
        return {self.members[n].ask("call", method, payload, 0): (n, method) for n in numbers}

    def answer(self, number: int, method: str, ref: Any) -> Any:
        """The result of a finished call. If the engine died, this is recorded and the result is None. Raises the
        engine's errors."""
        answer = result_of(self.calls, self.members[number], ref)
        if isinstance(answer, FailedCall):
            error = answer.error(method, SyncError if method in _LOADING else RolloutError)
            if not isinstance(error, WorkerError):
                raise error
            self.record_death(number, error)
            return None
        return answer

    def record_death(self, number: int, death: WorkerError) -> None:
        """Record that an engine died."""
        self.dead[number] = str(death)
        self._on_failure()

    def kill_stalled(self, stalled: Sequence[WorkerHandle], headline: str) -> None:
        """Kill stalled engines, so that nothing waits for them again. The other engines can then still be put to sleep,
        and the roles on their devices can save a checkpoint. A stall ends the run, so the stalled engines are not
        replaced."""
        for number, member in self.members.items():
            if any(member is other for other in stalled):
                self._stalled = self.dead[number] = headline
                member.kill()
        self._on_failure()

    def replace(self) -> list[int]:
        """Replace dead engines and return their numbers. An engine that cannot start counts as another death."""
        if self._stalled:
            raise WorkerError(f"the engines can no longer be called: {self._stalled}")
        replaced: list[int] = []
        while self.dead:
            dead = dict(sorted(self.dead.items()))
            left = self._restarts_left() - len(dead)
            if left < 0:
                raise WorkerError(
                    f"{'; '.join(dead.values())}\nThe run stops: {len(self._replaced_at)} engines were already "
                    f"replaced in the last hour, and {self._max_restarts} are allowed (launcher.max_restarts)"
                )
            self._replaced_at += [time.monotonic()] * len(dead)
            for number, cause in dead.items():
                _LOG.warning("%s\nThe engine is replaced; %d more may be replaced within this hour", cause, left)
                self.members[number].kill()
            try:
                started = self._start(list(dead))
            except WorkerError as error:
                self.dead = dict.fromkeys(dead, f"{error} (replacing an engine that died)")
                continue
            self.members |= zip(dead, started, strict=True)
            self.dead = {}
            replaced += dead
        return replaced

    def _restarts_left(self) -> int:
        while self._replaced_at and time.monotonic() - self._replaced_at[0] > _HOUR:
            self._replaced_at.popleft()
        return self._max_restarts - len(self._replaced_at)

    def close(self) -> None:
        """Give the engines a few seconds to release their resources, then end their processes."""
        if not self._closed and self.calls.connected:
            alive = [engine for n, engine in self.members.items() if n not in self.dead]
            self.calls.wait([e.ask("call", "close", None, 0) for e in alive], len(alive), _CLOSING)
        self._closed = True
        for engine in self.members.values():
            engine.kill()
