"""Two hosts on one machine: connected network namespaces. Their processes share nothing of the network."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from contextlib import suppress
from types import TracebackType

ADDRESSES = ("10.77.0.1", "10.77.0.2")
INTERFACE = "cable0"


class NotPermitted(Exception):
    """This process is not permitted to make network namespaces."""


class TwoHosts:
    """A context. At its end all processes in the namespaces are killed."""

    def __init__(self) -> None:
        self.names = [f"rlhf{os.getpid()}-{n}" for n in range(2)]

    def __enter__(self) -> TwoHosts:
        done = subprocess.run(["ip", "netns", "add", self.names[0]], capture_output=True, text=True, check=False)
        if done.returncode:
            raise NotPermitted(done.stderr.strip())
        try:
            self._connect()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for host in reversed(range(2)):
            for pid in self.pids(host):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        for host, name in enumerate(self.names):
            for _ in range(50):
                if not self.pids(host):
                    break
                time.sleep(0.1)
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)

    def command(self, host: int, *program: str) -> list[str]:
        """The command that runs ``program`` on a host."""
        return ["ip", "netns", "exec", self.names[host], *program]

    def pids(self, host: int) -> list[int]:
        """All processes of a host."""
        done = subprocess.run(["ip", "netns", "pids", self.names[host]], capture_output=True, text=True, check=False)
        return [int(pid) for pid in done.stdout.split()]

    def _connect(self) -> None:
        ends = [f"v{os.getpid()}{end}" for end in "ab"]
        _ip("netns", "add", self.names[1])
        _ip("link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
        for name, end, address in zip(self.names, ends, ADDRESSES, strict=True):
            _ip("link", "set", end, "netns", name)
            _ip("-n", name, "link", "set", end, "name", INTERFACE)
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", INTERFACE)
            _ip("-n", name, "link", "set", INTERFACE, "up")
            _ip("-n", name, "link", "set", "lo", "up")


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], capture_output=True, text=True, check=True)
