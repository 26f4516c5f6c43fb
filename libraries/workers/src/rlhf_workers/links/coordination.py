"""Coordination between the senders and receivers of a link: counters in a key-value store that the driver serves.

A process enters an operation that needs both ends, such as a collective, only when the other end is ready. The driver
calls :meth:`Coordination.abort` if a receiver died or could not load a bucket. This ends every wait.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from threading import Thread
from typing import TypeVar

from rlhf.errors import SyncError
from torch.distributed import TCPStore

T = TypeVar("T")

_ABORTED = "aborted"
_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.0002, 0.005
"""Seconds between two polls."""


class Coordination:
    """A connection to the store. :func:`serve` creates it in the driver, :meth:`connect` in every other process."""

    def __init__(self, store: TCPStore, timeout: float) -> None:
        self.store, self.timeout = store, timeout

    @classmethod
    def connect(cls, address: str, timeout: float) -> Coordination:
        """Args: address: ``HOST:PORT``. timeout: seconds of any one wait."""
        host, _, port = address.rpartition(":")
        return cls(TCPStore(host.strip("[]"), int(port), timeout=timedelta(seconds=timeout)), timeout)

    def abort(self) -> None:
        """From now on every wait of every process raises SyncError."""
        self.store.set(_ABORTED, "1")

    def add(self, key: str, amount: int = 1) -> None:
        """Add to the counter ``key``."""
        self.store.add(key, amount)

    def publish(self, key: str, value: str) -> None:
        self.store.set(key, value)

    def read(self, key: str, activity: str) -> str:
        """Wait until ``key`` has a value, and return it."""
        self.wait_until(lambda: self.store.check([key]), activity)
        return self.store.get(key).decode()

    def delete(self, key: str) -> None:
        self.store.delete_key(key)

    def wait_for_count(self, key: str, count: int, activity: str) -> None:
        """Wait until the counter ``key`` is at least ``count``."""
        self.wait_until(lambda: self.store.add(key, 0) >= count, activity)

    def wait_until(self, done: Callable[[], bool], activity: str) -> None:
        """Poll ``done`` until it returns True. Raises SyncError after the timeout, or when the sync is aborted.

        Args:
            activity: names the wait in messages, such as ``waiting for a bucket``.
        """
        end, pause = time.monotonic() + self.timeout, _SHORTEST_PAUSE
        while not done():
            if self.store.check([_ABORTED]):
                raise SyncError(f"the weight sync was aborted while {activity}")
            if time.monotonic() > end:
                raise SyncError(f"{activity} took longer than {self.timeout:g} s (sync.timeout)")
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def run_abortable(self, call: Callable[[], T], activity: str) -> T:
        """Run ``call``, which waits for other processes and cannot be interrupted, in a thread, and return its result.

        If the sync is aborted, the thread is left behind until its own timeout. Raises SyncError then, and when
        ``call`` raises RuntimeError.
        """
        answer: Future[T] = Future()

        def run() -> None:
            try:
                answer.set_result(call())
            except BaseException as error:
                answer.set_exception(error)

        Thread(target=run, daemon=True, name="rlhf-sync-connect").start()
        self.wait_until(answer.done, activity)
        try:
            return answer.result()
        except RuntimeError as error:
            raise SyncError(f"the weight sync failed while {activity}: {error}") from error


def serve(host: str, timeout: float) -> tuple[Coordination, str]:
    """Serve a store on the address ``host`` of this machine and on no other address.

    Returns:
        The connection of this process, and the store's ``HOST:PORT``.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # TCPStore itself would listen on all addresses of the machine.
    listener = socket.create_server((host, 0), family=family)
    port = listener.getsockname()[1]
    store = TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout),
        master_listen_fd=listener.detach(),
    )
    return Coordination(store, timeout), f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
