"""Waits for workers, and detects workers that will never answer."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from rlhf.errors import WorkerError

from rlhf_workers.driver.calls import CallFailed, Calls
from rlhf_workers.driver.handle import WorkerHandle
from rlhf_workers.driver.stall_report import StallReport
from rlhf_workers.launcher_options import WorkerOptions

SILENT = 10
"""Number of heartbeats without a response after which a worker is stalled."""

_LOOK_SECONDS = 1.0
"""Seconds between two calls of ``check``."""


@dataclass
class _State:
    member: WorkerHandle
    progress: int = -1
    moved: float = field(default_factory=time.monotonic)
    """Time of the last known progress."""
    answered: float = field(default_factory=time.monotonic)
    question: Any = None


OnStall = Callable[[Sequence[WorkerHandle], str], None]
"""Called with the stalled workers and the first line of the error, before the error is raised."""


def ignore_stall(stalled: Sequence[WorkerHandle], headline: str) -> None:
    """Leave the stalled workers as they are."""


class Watch(Protocol):
    """Creates the watchdog of some workers. ``doing`` names their current task."""

    def __call__(self, members: Sequence[WorkerHandle], doing: str, stalled: OnStall = ignore_stall) -> Watchdog: ...


class Watchdog:
    """Monitors pending workers until each has answered (:meth:`leave`)."""

    def __init__(
        self,
        members: Iterable[WorkerHandle],
        doing: str,
        calls: Calls,
        config: WorkerOptions,
        reports: Path,
        check: Callable[[], None] = lambda: None,
        stalled: OnStall = ignore_stall,
    ) -> None:
        """``check`` is called every second. It raises WorkerError if the workers cannot be reached any more."""
        self._states = {id(m): _State(m) for m in members}
        self.doing, self.calls, self.config, self.reports = doing, calls, config, reports
        self._reachable, self._on_stall = check, stalled
        self._next = time.monotonic() + config.heartbeat

    def join(self, member: WorkerHandle) -> None:
        """Start to monitor a worker. Does nothing if it is already monitored."""
        self._states.setdefault(id(member), _State(member))

    def leave(self, member: WorkerHandle) -> None:
        """Stop monitoring a worker, because it has answered."""
        self._states.pop(id(member), None)

    def wait(self, waitables: Sequence[Any], timeout: float | None = None) -> list[Any]:
        """The references and streams that are ready: at least one, or none after ``timeout`` seconds. Raises
        WorkerError for a stalled worker, and errors of ``check``."""
        end = None if timeout is None else time.monotonic() + timeout
        while True:
            self._reachable()
            time_s = time.monotonic()
            limit = min(time_s + _LOOK_SECONDS, self._next, self._next if end is None else end) - time_s
            ready, _ = self.calls.wait(waitables, timeout=max(limit, 0.0))
            if ready:
                if len(waitables) == 1:
                    return ready
                # The first wait returns one of them. Others may be ready, too.
                also, _ = self.calls.wait(waitables, len(waitables), 0.0)
                return also or ready
            if end is not None and time.monotonic() >= end:
                return []
            if time.monotonic() >= self._next:
                self._check()
                self._next = time.monotonic() + self.config.heartbeat

    def _check(self) -> None:
        for state in self._states.values():
            self._listen(state)
            # No second question while one is unanswered: it would wait behind the first one.
            if state.question is None:
                state.question = state.member.side_call("pulse")
        time_s = time.monotonic()
        silent = [s for s in self._states.values() if time_s - s.answered > SILENT * self.config.heartbeat]
        stuck = [s for s in self._states.values() if time_s - s.moved > self.config.stall_timeout]
        if silent or stuck:
            raise self._stalled(silent or sorted(stuck, key=lambda s: s.moved), bool(silent))

    def _listen(self, state: _State) -> None:
        if state.question is None or not self.calls.wait([state.question], timeout=0.0)[0]:
            return
        question, state.question = state.question, None
        try:
            progress = self.calls.get(question)
        except CallFailed:  # the worker is dead; the pending answer will show this too
            return
        state.answered = time.monotonic()
        if progress != state.progress:
            state.progress, state.moved = progress, state.answered

    def _stalled(self, stalled: Sequence[_State], silent: bool) -> WorkerError:
        first = stalled[0]
        seconds = time.monotonic() - (first.answered if silent else first.moved)
        waited_for = [s.member for s in self._states.values()]
        stall = StallReport(self.calls, first.member, self.doing, seconds, silent, waited_for)
        page = stall.write(self.reports)
        self._on_stall([s.member for s in stalled], stall.headline)
        return WorkerError(f"{stall.headline}. What each of its threads was doing, and what to look at: {page}")
