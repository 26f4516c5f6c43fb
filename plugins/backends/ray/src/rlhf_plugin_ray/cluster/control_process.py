"""Detects the loss of Ray's control process (GCS) before Ray ends this process because of it."""

from __future__ import annotations

import os
import socket
import sys
import threading
import time

from ray._private import worker as ray_worker
from rlhf.errors import WorkerError

_CONNECT_SECONDS = 5.0
_LOOK_SECONDS = 1.0
_OWN_SECONDS = 3.0
"""Seconds without an answer of a GCS that this process started. Nobody restarts it."""
_CLUSTER_SECONDS = 30.0
"""Seconds without an answer of a cluster's GCS, which may be restarted. After 60 seconds Ray itself ends this
process."""
_FRAME = b"\0\0\0\4\0\0\0\0\0"
"""An empty SETTINGS frame of HTTP/2 (RFC 9113, section 3.4). Each side of a connection begins with one."""
_END_SECONDS = 20.0
"""Time for the run to end by itself with the error. After it this process is ended, as Ray would do."""


class ControlProcessMonitor:
    """Connects to the GCS every second in a thread, until :meth:`stop`."""

    def __init__(self, address: str, is_owner: bool) -> None:
        """``is_owner``: this process started the GCS."""
        self.lost = ""
        """The message about the loss of the GCS; empty while it is reachable."""
        self._address, self._is_owner = address, is_owner
        self._stopped = threading.Event()
        threading.Thread(target=self._watch, name="ray-control", daemon=True).start()

    def check(self) -> None:
        """Raises WorkerError if the GCS is lost."""
        if self.lost:
            raise WorkerError(self.lost)

    def stop(self) -> None:
        self._stopped.set()

    def _watch(self) -> None:
        limit = _OWN_SECONDS if self._is_owner else _CLUSTER_SECONDS
        answered = time.monotonic()
        while not self._stopped.wait(_LOOK_SECONDS):
            begin = time.monotonic()
            problem = why_unreachable(self._address)
            if not problem:
                answered = begin
            elif time.monotonic() - answered >= limit:
                self.lost = self._message(problem, limit)
                break
        # the run may be in code that does not call check(), or hang in a call of Ray
        if not self._stopped.wait(_END_SECONDS):
            kill_own_ray()
            sys.stdout.flush()
            sys.stderr.write(f"rlhf: {self.lost}\n")
            sys.stderr.flush()
            os._exit(1)

    def _message(self, problem: str, seconds: float) -> str:
        head = "`dmesg` shows" if self._is_owner else "`ray status` and the head node's dmesg show"
        return (
            f"Ray's control process (GCS) at {self._address} is gone: {problem}, for {seconds:g} s. The workers cannot "
            f"be used without it, so the run ends. {head} whether it was killed (out of memory, or by `ray stop`); "
            "gcs_server.out in session_latest/logs of Ray's temporary folder has its last output. Continue from the "
            "newest checkpoint with --resume."
        )


def kill_own_ray() -> None:
    """Kill the processes of a Ray that this process started. The workers notice it and end. Otherwise they would
    outlive the GCS by a minute."""
    if (node := ray_worker._global_node) is not None:
        node.kill_all_processes(check_alive=False, allow_graceful=False)


def why_unreachable(address: str) -> str:
    """Why nothing answers at HOST:PORT; empty if something answers. Ray itself would take minutes to detect it."""
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdigit():
        return ""
    try:
        socket.create_connection((host.strip("[]"), int(port)), _CONNECT_SECONDS).close()
    except (OSError, OverflowError, ValueError) as cause:
        return getattr(cause, "strerror", None) or str(cause)
    return ""


def why_no_gcs(address: str) -> str:
    """Why the program that listens at HOST:PORT is no GCS, which speaks HTTP/2; empty if it may be one. Ray itself
    would try for minutes. With TLS nothing is checked, and a program without an answer may be a busy GCS."""
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdigit() or os.environ.get("RAY_USE_TLS", "0") != "0":
        return ""
    try:
        with socket.create_connection((host.strip("[]"), int(port)), _CONNECT_SECONDS) as connection:
            connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _FRAME)
            answer = connection.recv(len(_FRAME))
    except TimeoutError:
        return ""
    except OSError:
        answer = b""
    is_settings = answer[3:4] == _FRAME[3:4]
    return "" if is_settings else "another program than Ray's control process (GCS, port 6379 by default) listens there"
