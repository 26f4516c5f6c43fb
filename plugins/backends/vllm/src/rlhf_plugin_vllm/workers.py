"""The processes of an engine's workers: seeing at once that one died, and saying so."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import wait
from threading import Event, Lock, Thread
from typing import Any

from rlhf.errors import WorkerError

GRACE_SECONDS = 2.0
"""After a call failed: for a death that caused it to be seen."""


class Workers:
    """Of one engine; without processes where the engine computes in this one.

    Args:
        executor: vLLM's.
    """

    def __init__(self, executor: Any) -> None:
        self._processes = [worker.proc for worker in getattr(executor, "workers", None) or ()]
        self._closing = Event()
        self._death, self._naming = "", Lock()
        if self._processes:
            Thread(target=self._watch, daemon=True, name="rlhf-vllm-workers").start()

    def _watch(self) -> None:
        """Where one died the others wait for it, some of them deaf to signals but one, and vLLM waits for those: end
        them, so that it gives up at once."""
        wait([process.sentinel for process in self._processes])
        if self._closing.is_set():
            return
        self._name_death()
        for process in self._processes:
            process.kill()

    def _name_death(self) -> None:
        """Once, before the others are ended."""
        with self._naming:
            dead = [n for n, p in enumerate(self._processes) if not self._death and wait([p.sentinel], 0)]
            self._death = self._death or " and ".join(f"engine worker {n} {_end(self._processes[n])}" for n in dead)

    @contextmanager
    def needed(self) -> Iterator[None]:
        """WorkerError where they are not all alive, or one's death is why a call inside failed."""
        self.check()
        try:
            yield
        except Exception as error:
            self.check(GRACE_SECONDS, error)
            raise

    def check(self, seconds: float = 0, cause: Exception | None = None) -> None:
        """WorkerError where one has died, or does so within ``seconds``."""
        if self._processes and wait([process.sentinel for process in self._processes], seconds):
            self._name_death()
            raise WorkerError(
                f"the generator 'vllm' is lost: {self._death}. Start another; RLHF_VLLM_LOG=INFO lets its workers say "
                "what happens to them."
            ) from cause

    def closing(self) -> None:
        """From now on they may end."""
        self._closing.set()


def _end(process: Any) -> str:
    """How a process that ended did."""
    end = time.monotonic() + 1
    while process.exitcode is None and time.monotonic() < end:  # another thread is asking the system for it
        time.sleep(0.01)
    code = process.exitcode
    if code is None or code >= 0:
        return f"(process {process.pid}) ended with exit code {code}"
    name = signal.Signals(-code).name
    cause = ", which is how the system ends processes where memory runs out" if name == "SIGKILL" else ""
    return f"(process {process.pid}) was killed by {name}{cause}"
