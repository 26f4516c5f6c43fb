"""The worker processes of an engine. The death of a worker is detected and reported at once."""

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
"""Seconds to wait after a failed call for the death of a worker, which may be its cause, to become visible."""
CLOSING_SECONDS = 3.0
"""Seconds for workers to end by themselves when an engine is closed."""


class WorkerProcesses:
    """The worker processes of one engine; none if the engine computes in this process.

    Args:
        executor: vLLM's executor.
        after_death: called after one worker died and all others were killed, before any error is raised.
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
        """Kill the other workers if one died. They wait for the dead one, some ignore all signals except SIGKILL, and
        vLLM would wait for them."""
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
        """Record which worker died, once, before the others are killed."""
        with self._naming:
            dead = [n for n, p in enumerate(self._processes) if not self._death and wait([p.sentinel], 0)]
            self._death = self._death or " and ".join(f"engine worker {n} {_end(self._processes[n])}" for n in dead)

    @contextmanager
    def needed(self) -> Iterator[None]:
        """Context for calls that need the workers. Raises WorkerError if a worker is already dead, or if its death made
        the call fail."""
        self.check()
        try:
            yield
        except Exception as error:
            self.check(GRACE_SECONDS, error)
            raise

    def check(self, seconds: float = 0, cause: Exception | None = None) -> None:
        """Raises WorkerError if a worker has died, or dies within ``seconds``."""
        if self._processes and wait([process.sentinel for process in self._processes], seconds):
            self._name_death()
            self._watcher.join(2 * GRACE_SECONDS)
            raise WorkerError(
                f"the generator 'vllm' is lost: {self._death}. Start another one; with RLHF_VLLM_LOG=INFO its workers "
                "log what happens to them."
            ) from cause

    def end(self) -> None:
        """Ask the workers to end, and kill those that take longer than CLOSING_SECONDS."""
        self._closing.set()
        for handle in self._handles:
            if handle.death_writer is not None:  # workers end when this pipe is closed
                handle.death_writer.close()
                handle.death_writer = None
        end = time.monotonic() + CLOSING_SECONDS
        for process in self._processes:
            wait([process.sentinel], max(0.0, end - time.monotonic()))
        self._kill()


def _end(process: Any) -> str:
    """Description of how a process ended."""
    end = time.monotonic() + 1
    while process.exitcode is None and time.monotonic() < end:  # another thread is collecting it
        time.sleep(0.01)
    code = process.exitcode
    if code is None or code >= 0:
        return f"(process {process.pid}) ended with exit code {code}"
    name = signal.Signals(-code).name
    cause = ", as the system does when memory runs out" if name == "SIGKILL" else ""
    return f"(process {process.pid}) was killed by {name}{cause}"
