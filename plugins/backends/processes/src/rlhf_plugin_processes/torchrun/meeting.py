"""How other processes of torchrun connect to the driver: over TCP, with the token that is in the store."""

from __future__ import annotations

import hmac
import json
import logging
import secrets
import socket
import threading
import time
from typing import Any

from rlhf.errors import ConfigError, WorkerError

from rlhf_plugin_processes.torchrun.environment import Member, store

_LOG = logging.getLogger(__name__)
_KEY = "rlhf/driver"
"""In the store: port and token of the driver, as JSON."""
_HELLO_BYTES = 4096
_HELLO_SECONDS = 10.0
_LOOK_SECONDS = 0.5
_SILENT_SECONDS = 20.0
"""After which the driver says whom it waits for: torchrun does not tell it that another machine's process ended."""
_LOST_AFTER = (
    (socket.TCP_KEEPIDLE, 15),
    (socket.TCP_KEEPINTVL, 5),
    (socket.TCP_KEEPCNT, 6),
    (socket.TCP_USER_TIMEOUT, 45_000),
)
"""A machine that does not answer for 45 s is lost. While sent data is not acknowledged, only the last one (ms) applies;
without it the kernel sends again for a quarter of an hour."""


class Meeting:
    """The driver's side. A connection without the token is closed."""

    def __init__(self, driver: Member) -> None:
        """Raises ConfigError if an earlier run used this start of torchrun."""
        self._store = store()
        if self._store.check([_KEY]):
            raise ConfigError(
                "launcher 'torchrun': this start of torchrun has had a run, and its other processes ended with it. "
                "Start torchrun once for each run."
            )
        self._token = secrets.token_hex(32)
        self._arrived: dict[str, tuple[socket.socket, dict[str, Any]]] = {}
        self._changed = threading.Condition()
        self._server = socket.create_server(("127.0.0.1" if driver.one_machine else "", 0), backlog=128)
        threading.Thread(target=self._accept, name="connections of machines", daemon=True).start()
        endpoint = {"port": self._server.getsockname()[1], "token": self._token}
        self._store.set(_KEY, json.dumps(endpoint))

    def take(self, name: str, timeout: float) -> tuple[socket.socket, dict[str, Any]]:
        """The connection that says ``name``, and its facts. Raises WorkerError after ``timeout`` seconds."""
        look = (
            "Look whether torchrun runs on every machine, what it says there, and whether a firewall stops "
            "connections between the machines."
        )
        silent = min(timeout, _SILENT_SECONDS)
        with self._changed:
            if not self._changed.wait_for(lambda: name in self._arrived, silent):
                _LOG.warning("%s has not connected to the driver for %g s. %s", name, silent, look)
            if not self._changed.wait_for(lambda: name in self._arrived, timeout - silent):
                raise WorkerError(
                    f"{name} did not connect to the driver within {timeout:g} s (launcher.start_timeout). {look}"
                )
            return self._arrived.pop(name)

    def close(self) -> None:
        self._server.close()
        with self._changed:
            for end, _ in self._arrived.values():
                end.close()
            self._arrived.clear()

    def _accept(self) -> None:
        while True:
            try:
                end, _ = self._server.accept()
            except OSError:
                if self._server.fileno() < 0:  # closed
                    return
                time.sleep(_LOOK_SECONDS)  # the other end is gone already, or this process has too many open files
            else:
                threading.Thread(target=self._greet, args=(end,), name="connection", daemon=True).start()

    def _greet(self, end: socket.socket) -> None:
        try:
            end.settimeout(_HELLO_SECONDS)
            hello = json.loads(_line(end))
            is_member = hmac.compare_digest(str(hello["token"]).encode(), self._token.encode())
        except (OSError, ValueError, KeyError, TypeError, RecursionError):  # the other end may send anything
            is_member = False
        if not is_member:
            end.close()
            return
        _prepare(end)
        with self._changed:
            self._arrived[hello["name"]] = end, hello["facts"]
            self._changed.notify_all()


class DriverAddress:
    """The other side: where the driver is, once it has placed its run."""

    def __init__(self, member: Member) -> None:
        """Waits for the driver, which reads data and checks the run first, however long that takes. Raises WorkerError
        when torchrun ends on the driver's machine."""
        from torch.distributed import DistError

        try:
            shared_store = store()
            while not shared_store.check([_KEY]):
                time.sleep(_LOOK_SECONDS)
            endpoint = json.loads(shared_store.get(_KEY))
        except DistError as cause:
            raise WorkerError(
                f"torchrun on the machine of the driver ({member.driver}) ended before the run started its workers. "
                "The output of rank 0 says why."
            ) from cause
        self._host, self._port, self._token = member.driver, endpoint["port"], endpoint["token"]

    def connect(self, name: str, facts: dict[str, Any]) -> socket.socket:
        """A connection. The addresses of both its ends are added to ``facts``."""
        end = socket.create_connection((self._host, self._port), timeout=_HELLO_SECONDS)
        ends = {"address": end.getsockname()[0], "driver": end.getpeername()[0]}
        end.sendall(json.dumps({"token": self._token, "name": name, "facts": {**facts, **ends}}).encode() + b"\n")
        _prepare(end)
        return end


def _prepare(end: socket.socket) -> None:
    end.settimeout(None)
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _LOST_AFTER:
        end.setsockopt(socket.IPPROTO_TCP, option, value)


def _line(end: socket.socket) -> bytes:
    """One line, and nothing after it, because messages begin after the line."""
    line = bytearray()
    while not line.endswith(b"\n"):
        byte = end.recv(1)
        if not byte or len(line) > _HELLO_BYTES:
            raise OSError("no line came")
        line += byte
    return bytes(line)
