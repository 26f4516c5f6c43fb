"""Waits for workers, and detects workers that will never answer."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import ray
from ray.exceptions import RayError
from rlhf.errors import WorkerError

from rlhf_plugin_ray.config import RayConfig
from rlhf_plugin_ray.workers.handle import WorkerHandle
from rlhf_plugin_ray.workers.stall_report import StallReport

SILENT = 10
"""Number of heartbeats without a response after which a worker is stalled."""

_LOOK_SECONDS = 1.0
"""Between two checks of Ray's control process."""


@dataclass
class _Seen:
    member: WorkerHandle
    progress: int = -1
    moved: float = field(default_factory=time.monotonic)
    """Time of the last known progress."""
    answered: float = field(default_factory=time.monotonic)
    question: Any = None


OnStall = Callable[[Sequence[WorkerHandle], str], None]
"""Called with the stalled workers and the first line of the error, before the error is raised."""


def ignore_stall(stalled: Sequence[WorkerHandle], headline: str) -> None:
    """The stalled workers are left as they are."""


class Watch(Protocol):
    """Makes the watchdog of some workers, while they compute what ``doing`` names."""

    def __call__(self, members: Sequence[WorkerHandle], doing: str, stalled: OnStall = ignore_stall) -> Watchdog: ...


class Watchdog:
    """Monitors pending workers until each has answered (:meth:`leave`)."""

    def __init__(
        self,
        members: Iterable[WorkerHandle],
        doing: str,
        config: RayConfig,
        reports: Path,
        check: Callable[[], None] = lambda: None,
        stalled: OnStall = ignore_stall,
    ) -> None:
        """``check`` raises WorkerError when Ray's control process is gone."""
        self._seen = {id(m): _Seen(m) for m in members}
        self.doing, self.config, self.reports, self._cluster, self._on_stall = doing, config, reports, check, stalled
        self._begun = self._next = time.monotonic()
        self._next += config.heartbeat

    def join(self, member: WorkerHandle) -> None:
        """Monitor a worker, from now on if it was not monitored."""
        self._seen.setdefault(id(member), _Seen(member))

    def leave(self, member: WorkerHandle) -> None:
        """Stop monitoring a worker, because it has answered."""
        self._seen.pop(id(member), None)

    def wait(self, waitables: Sequence[Any], timeout: float | None = None) -> list[Any]:
        """The references and streams that are ready: at least one, or none after ``timeout`` seconds. Raises
        WorkerError for a stalled worker, and when Ray's control process is gone."""
        end = None if timeout is None else time.monotonic() + timeout
        while True:
            self._cluster()
            now = time.monotonic()
            limit = min(now + _LOOK_SECONDS, self._next, self._next if end is None else end) - now
            ready, _ = ray.wait(list(waitables), num_returns=1, timeout=max(limit, 0.0), fetch_local=False)
            if ready:
                if len(waitables) == 1:
                    return ready
                also, _ = ray.wait(list(waitables), num_returns=len(waitables), timeout=0, fetch_local=False)
                return also or ready
            if end is not None and time.monotonic() >= end:
                return []
            if time.monotonic() >= self._next:
                self._check()
                self._next = time.monotonic() + self.config.heartbeat

    def _check(self) -> None:
        for seen in self._seen.values():
            self._listen(seen)
            if seen.question is None:
                seen.question = seen.member.beside("pulse")
        now = time.monotonic()
        silent = [s for s in self._seen.values() if now - s.answered > SILENT * self.config.heartbeat]
        stuck = [s for s in self._seen.values() if now - s.moved > self.config.stall_timeout]
        if silent or stuck:
            raise self._stalled(silent or sorted(stuck, key=lambda s: s.moved), bool(silent))

    def _listen(self, seen: _Seen) -> None:
        if seen.question is None or not ray.wait([seen.question], timeout=0)[0]:
            return
        question, seen.question = seen.question, None
        try:
            progress = ray.get(question)
        except RayError:  # it is dead, which the pending answer will show too
            return
        seen.answered = time.monotonic()
        if progress != seen.progress:
            seen.progress, seen.moved = progress, seen.answered

    def _stalled(self, stalled: Sequence[_Seen], silent: bool) -> WorkerError:
        first = stalled[0]
        seconds = time.monotonic() - (first.answered if silent else first.moved)
        stall = StallReport(first.member, self.doing, seconds, silent, [s.member for s in self._seen.values()])
        page = stall.write(self.reports)
        self._on_stall([s.member for s in stalled], stall.headline)
        return WorkerError(f"{stall.headline}. What each of its threads was doing, and what to look at: {page}")
