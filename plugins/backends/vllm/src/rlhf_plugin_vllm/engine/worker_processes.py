"""The processes of an engine's workers: seeing at once that one died, and saying so."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import wait
from threading import Event, Lock, Thread
from typing import Any

from rlhf.errors import WorkerError

GRACE_SECONDS = 2.0
"""After a call failed: for a death that caused it to be seen."""
CLOSING_SECONDS = 3.0
"""For workers to end by themselves. Whoever closes an engine may be in a hurry."""


class WorkerProcesses:
    """Of one engine; without processes where the engine computes in this one.

    Args:
        executor: vLLM's.
        after_death: called once all of them have ended because one of them died, and before anybody is told.
    """

    def __init__(self, executor: Any, after_death: Callable[[], Any]) -> None:
        self._handles = list(getattr(executor, "workers", None) or ())
        self._processes = [handle.proc for handle in self._handles]
        self._after_death, self._closing = after_death, Event()
        self._death, self._naming = "", Lock()
        self._watcher = Thread(target=self._watch, daemon=True, name="rlhf-vllm-workers")
        if self._processes:
            self._watcher.start()

    def _watch(self) -> None:
        """Where one died the others wait for it, some of them deaf to signals but one, and vLLM waits for those: end
        them, so that it gives up at once."""
        wait([process.sentinel for process in self._processes])
        if self._closing.is_set():
            return
        self._name_death()
        self._kill()
        self._after_death()

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            wait([process.sentinel], GRACE_SECONDS)

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
            self._watcher.join(2 * GRACE_SECONDS)
            raise WorkerError(
                f"the generator 'vllm' is lost: {self._death}. Start another; RLHF_VLLM_LOG=INFO lets its workers say "
                "what happens to them."
            ) from cause

    def end(self) -> None:
        """Ask them to end, and make them where they take long."""
        self._closing.set()
        for handle in self._handles:
            if handle.death_writer is not None:  # its closing is what a worker waits for
                handle.death_writer.close()
                handle.death_writer = None
        end = time.monotonic() + CLOSING_SECONDS
        for process in self._processes:
            wait([process.sentinel], max(0.0, end - time.monotonic()))
        self._kill()


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
