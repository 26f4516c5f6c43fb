"""Ray nodes on one machine: two connected network namespaces, each with its own raylet."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from tests.support.two_hosts import ADDRESSES, TwoHosts

ROOT = str(Path(__file__).resolve().parents[4])
"""The programs of the nodes import ``tests.support``."""
PORT = 6379
RAY = (sys.executable, "-m", "ray.scripts.scripts")
"""The command ``ray``."""


class RayNodes:
    """A context: two hosts, with a Ray node on both or on the first. Node 0 is the head."""

    def __init__(self, *paths: str, cpus: int = 2, dashboard: bool = False) -> None:
        """``paths``: folders that go before this process's PYTHONPATH, for each node's workers."""
        self.dashboard = dashboard
        self.hosts = TwoHosts()
        self.cpus, self.paths = cpus, paths
        self.folder = tempfile.TemporaryDirectory(prefix="rlhf-ray-", dir="/tmp")  # short: it holds sockets
        self._started: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> RayNodes:
        try:
            self.hosts.__enter__()
            self._ray(0, "--head", "--port", str(PORT), f"--include-dashboard={str(self.dashboard).lower()}")
            if len(self.paths) > 1:
                self._ray(1, "--address", f"{ADDRESSES[0]}:{PORT}")
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.hosts.__exit__(kind, error, tb)
        for process in self._started:
            process.wait(30)
        self.folder.cleanup()

    def environment(self, node: int) -> dict[str, str]:
        settings = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}
        variables = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
        path = os.pathsep.join(filter(None, (self.paths[node], ROOT, variables.get("PYTHONPATH"))))
        return {**variables, **settings, "PYTHONPATH": path}

    def run(self, *program: str, timeout: float = 600.0) -> subprocess.CompletedProcess[str]:
        """Run a program on node 0."""
        command, env = self.hosts.command(0, *program), self.environment(0)
        return subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=env, check=False)

    def raylet(self, node: int) -> int:
        """The process id of the node's raylet."""
        for pid in self.hosts.pids(node):
            with suppress(OSError):
                if Path(f"/proc/{pid}/comm").read_text().strip() == "raylet":
                    return pid
        raise AssertionError(f"node {node} has no raylet")

    def _ray(self, node: int, *options: str) -> None:
        log = Path(self.folder.name) / f"node-{node}.log"
        command = self.hosts.command(
            node, *RAY, "start", "--block",
            "--disable-usage-stats", "--dashboard-host", ADDRESSES[node], "--node-ip-address", ADDRESSES[node],
            "--num-cpus", str(self.cpus), "--object-store-memory", str(100 * 2**20), *options,
        )  # fmt: skip
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
