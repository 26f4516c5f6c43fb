"""How the two ends of a link agree on whose turn it is: counters in a key-value store that the driver serves.

Neither end enters an operation that only works together before the other end is there, and both give up as soon as the
driver says so, be it because a receiver died or because what arrived could not be loaded.
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

_GIVEN_UP = "given up"
_SHORTEST, _LONGEST = 0.0002, 0.005
"""Seconds between two looks."""


class Meeting:
    """One end's view of the store; made by :func:`serve` on the driver, by :meth:`at` elsewhere."""

    def __init__(self, store: TCPStore, timeout: float) -> None:
        self.store, self.timeout = store, timeout

    @classmethod
    def at(cls, address: str, timeout: float) -> Meeting:
        """Args: address: ``HOST:PORT``. timeout: seconds of any one wait."""
        host, _, port = address.rpartition(":")
        return cls(TCPStore(host.strip("[]"), int(port), timeout=timedelta(seconds=timeout)), timeout)

    def give_up(self) -> None:
        """Every wait, here and elsewhere, ends with SyncError from now on."""
        self.store.set(_GIVEN_UP, "1")

    def add(self, key: str, amount: int = 1) -> None:
        self.store.add(key, amount)

    def publish(self, key: str, value: str) -> None:
        self.store.set(key, value)

    def read(self, key: str, what: str) -> str:
        """The value of a key, once there is one."""
        self.until(lambda: self.store.check([key]), what)
        return self.store.get(key).decode()

    def forget(self, key: str) -> None:
        self.store.delete_key(key)

    def reached(self, key: str, count: int, what: str) -> None:
        """Wait until ``key`` was added to ``count`` times."""
        self.until(lambda: self.store.add(key, 0) >= count, what)

    def until(self, done: Callable[[], bool], what: str) -> None:
        """Wait; SyncError where it takes longer than the timeout, or the sync was given up."""
        end, pause = time.monotonic() + self.timeout, _SHORTEST
        while not done():
            if self.store.check([_GIVEN_UP]):
                raise SyncError(f"the weight sync was given up while {what}")
            if time.monotonic() > end:
                raise SyncError(f"{what} took longer than {self.timeout:g} s (sync.timeout)")
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST)

    def leaving_behind(self, call: Callable[[], T], what: str) -> T:
        """What ``call`` returns, which waits for other ends by itself and cannot be told to stop: where the sync is
        given up, it is left to its own timeout in a thread. SyncError then, and where it raises RuntimeError."""
        answer: Future[T] = Future()

        def run() -> None:
            try:
                answer.set_result(call())
            except BaseException as error:
                answer.set_exception(error)

        Thread(target=run, daemon=True, name="rlhf-sync-meeting").start()
        self.until(answer.done, what)
        try:
            return answer.result()
        except RuntimeError as error:
            raise SyncError(f"the weight sync broke off while {what}: {error}") from error


def serve(host: str, timeout: float) -> tuple[Meeting, str]:
    """A store on the address ``host`` of this machine and no other, and its ``HOST:PORT``."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
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
    return Meeting(store, timeout), f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
