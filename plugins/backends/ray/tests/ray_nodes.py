"""Ray nodes on one machine: two connected network namespaces, each with its own raylet."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType

ADDRESSES = ("10.77.0.1", "10.77.0.2")
INTERFACE = "cable0"
PORT = 6379
RAY = (sys.executable, "-m", "ray.scripts.scripts")
"""The command ``ray``."""


class NotPermitted(Exception):
    """This process is not permitted to make network namespaces."""


class RayNodes:
    """A context: two namespaces, with a Ray node in both or in the first. Node 0 is the head."""

    def __init__(self, *paths: str, cpus: int = 2, dashboard: bool = False) -> None:
        """``paths``: folders that go before this process's PYTHONPATH, for each node's workers."""
        self.dashboard = dashboard
        self.names = [f"rlhf{os.getpid()}-{n}" for n in range(2)]
        self.cpus, self.paths = cpus, paths
        self.folder = tempfile.TemporaryDirectory(prefix="rlhf-ray-", dir="/tmp")  # short: it holds sockets
        self._started: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> RayNodes:
        try:
            self._cable()
            self._ray(0, "--head", "--port", str(PORT), f"--include-dashboard={str(self.dashboard).lower()}")
            if len(self.paths) > 1:
                self._ray(1, "--address", f"{ADDRESSES[0]}:{PORT}")
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for name in reversed(self.names):
            for pid in self._pids(name):  # only this test starts processes in the namespace
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        for process in self._started:
            process.wait(30)
        for name in self.names:
            for _ in range(50):
                if not self._pids(name):
                    break
                time.sleep(0.1)
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
        self.folder.cleanup()

    def environment(self, node: int) -> dict[str, str]:
        more = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}
        kept = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
        path = os.pathsep.join(filter(None, (self.paths[node], kept.get("PYTHONPATH"))))
        return {**kept, **more, "PYTHONPATH": path}

    def run(self, *program: str, timeout: float = 600.0) -> subprocess.CompletedProcess[str]:
        """Run a program on node 0."""
        command = ["ip", "netns", "exec", self.names[0], *program]
        env = self.environment(0)
        return subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=env, check=False)

    def raylet(self, node: int) -> int:
        """The process id of the node's raylet."""
        for pid in self._pids(self.names[node]):
            with suppress(OSError):
                if Path(f"/proc/{pid}/comm").read_text().strip() == "raylet":
                    return pid
        raise AssertionError(f"node {node} has no raylet")

    def _cable(self) -> None:
        done = subprocess.run(["ip", "netns", "add", self.names[0]], capture_output=True, text=True, check=False)
        if done.returncode:
            self.names = []
            raise NotPermitted(done.stderr.strip())
        ends = [f"v{os.getpid()}{end}" for end in "ab"]
        _ip("netns", "add", self.names[1])
        _ip("link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
        for name, end, address in zip(self.names, ends, ADDRESSES, strict=True):
            _ip("link", "set", end, "netns", name)
            _ip("-n", name, "link", "set", end, "name", INTERFACE)
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", INTERFACE)
            _ip("-n", name, "link", "set", INTERFACE, "up")
            _ip("-n", name, "link", "set", "lo", "up")

    def _ray(self, node: int, *options: str) -> None:
        log = Path(self.folder.name) / f"node-{node}.log"
        command = [
            "ip", "netns", "exec", self.names[node], *RAY, "start", "--block",
            "--disable-usage-stats", "--dashboard-host", ADDRESSES[node], "--node-ip-address", ADDRESSES[node],
            "--num-cpus", str(self.cpus), "--object-store-memory", str(100 * 2**20), *options,
        ]  # fmt: skip
        if "--head" in options:
            command += ["--temp-dir", self.folder.name]
        with log.open("wb") as out:
            self._started.append(
                subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=self.environment(node))
            )
        for _ in range(1800):
            if "Ray runtime started" in log.read_text():
                return
            if self._started[-1].poll() is not None:
                break
            time.sleep(0.1)
        raise AssertionError(f"node {node} did not start:\n{log.read_text()}")

    def _pids(self, name: str) -> list[int]:
        done = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, check=False)
        return [int(pid) for pid in done.stdout.split()]


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], capture_output=True, text=True, check=True)
