"""Short waits of OpenMP threads while other processes use the same cores.

The threads of an operation wait for each other at its end. libgomp, the OpenMP of torch's packages, lets them spin for
some milliseconds before they sleep. This is fastest on idle cores. If another process occupies the core of one thread,
the other threads spin in every operation. A step then takes many times as long, and the process spends its processor
time on waiting.

While a process has more OpenMP threads than cores, libgomp spins only briefly. So a second, idle team of threads makes
waits short. :class:`ShortWaits` keeps one while threads of this process wait for a core. Work is still divided among
the same threads, so no result changes.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from pathlib import Path

import torch

CHOSEN = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
"""Variables with which a user configures how threads wait. If one is set, nothing is changed here."""
INTERVAL = 0.25
BUSY, IDLE = 0.15, 0.05
"""Waits become short above the first and long below the second: seconds per second in which a thread of this process
could run and had no core."""
PARALLEL = 1 << 17
"""Elements of an operation that torch divides among its threads."""


def without_a_core() -> float:
    """Total seconds for which the threads of this process were runnable and waited for a core."""
    total = 0
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the thread ended
            total += int(Path(f"/proc/self/task/{thread}/schedstat").read_text().split()[1])
    return total / 1e9


def applicable() -> bool:
    """Whether a second team would exceed the cores and the user has set none of the variables."""
    if any(name in os.environ for name in CHOSEN):
        return False
    if not Path("/proc/self/schedstat").exists():  # not Linux, or these times are not recorded
        return False
    threads = torch.get_num_threads()
    return threads > 1 and 2 * threads - 1 > len(os.sched_getaffinity(0))


class SecondTeam:
    """An idle team of OpenMP threads. It ends with the thread that started it."""

    def __init__(self) -> None:
        self._end, started = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._hold, args=(started,), name="second team", daemon=True)
        self._thread.start()
        started.wait()

    def _hold(self, started: threading.Event) -> None:
        try:
            torch.ones(PARALLEL).add_(1)
        finally:
            started.set()
        self._end.wait()

    def close(self) -> None:
        self._end.set()
        self._thread.join()


class ShortWaits:
    """Checks four times a second whether threads wait for cores, until :meth:`close`."""

    def __init__(self) -> None:
        self.team: SecondTeam | None = None
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="short waits", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._end.set()
        if self._thread.is_alive():
            self._thread.join()
        self.decide(0.0)

    def decide(self, share: float) -> None:
        """``share``: seconds without a core per second."""
        if self.team is None and share > BUSY:
            self.team = SecondTeam()
        elif self.team is not None and share < IDLE:
            self.team.close()
            self.team = None

    def _watch(self) -> None:
        last_time_s, last_wait_s = time.monotonic(), without_a_core()
        while not self._end.wait(INTERVAL):
            time_s, wait_s = time.monotonic(), without_a_core()
            # The times of ended threads are missing in the new total.
            self.decide(max(0.0, wait_s - last_wait_s) / (time_s - last_time_s))
            last_time_s, last_wait_s = time_s, wait_s
