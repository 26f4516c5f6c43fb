"""A Ray that the run starts: only this machine reaches it, and it ends with the run, however the run ends."""

from __future__ import annotations

import http.server
import json
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from pathlib import Path

import pytest
from ray_paths import HERE, PATHS

pytestmark = [pytest.mark.slow, pytest.mark.full]

MARK = "RLHF_TEST_MARK"


class Driver:
    """A process of the test program in its own process group, and the processes that it started."""

    def __init__(self, *arguments: str, **environment: str) -> None:
        self.mark = uuid.uuid4().hex
        self.shared = set(os.listdir("/dev/shm"))
        env = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
        path = os.pathsep.join(filter(None, (PATHS, env.get("PYTHONPATH"))))
        env |= {MARK: self.mark, "PYTHONPATH": path, "RAY_worker_niceness": "0", **environment}
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "own_ray_run.py"), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=env,
            start_new_session=True,
        )

    def ready(self) -> dict[str, str]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):
                return json.loads(line)
        raise AssertionError(self.process.communicate()[1])

    def family(self) -> list[int]:
        """Living processes that inherited the environment variable of this driver."""
        pids = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if f"{MARK}={self.mark}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                    pids.append(int(folder.name))
            except OSError:
                continue
        return pids

    def listens(self) -> set[str]:
        """Addresses, as /proc writes them, at which the family listens."""
        sockets = set()
        for pid in self.family():
            for link in Path(f"/proc/{pid}/fd").glob("*"):
                try:
                    sockets.add(os.readlink(link).removeprefix("socket:[").removesuffix("]"))
                except OSError:
                    continue
        rows = [r.split() for f in ("tcp", "tcp6") for r in Path(f"/proc/net/{f}").read_text().splitlines()[1:]]
        return {r[1].rpartition(":")[0] for r in rows if r[3] == "0A" and r[9] in sockets}

    def leaves_nothing(self) -> None:
        for _ in range(900):  # a starting process ends only when it notices that its parent died
            if not self.family():
                break
            time.sleep(0.2)
        commands = [Path(f"/proc/{pid}/cmdline").read_text()[:200] for pid in self.family()]
        assert not commands
        new = {n for n in set(os.listdir("/dev/shm")) - self.shared if "plasma" in n or "ray" in n}
        assert {n for n in new if not _is_mapped(f"/dev/shm/{n}")} == set(), "segments that no living process maps"


def _is_mapped(path: str) -> bool:
    """Whether any living process maps the file."""
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            if path in maps.read_text():
                return True
        except OSError:
            continue
    return False


@pytest.fixture
def driver():
    drivers: list[Driver] = []

    def start(*arguments: str, **environment: str) -> Driver:
        drivers.append(Driver(*arguments, **environment))
        return drivers[-1]

    yield start
    for instance in drivers:
        for pid in instance.family():
            os.kill(pid, signal.SIGKILL)
        instance.process.communicate()


LOOPBACK = {"0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000"}


def test_only_this_machine_reaches_it(driver):
    run = driver("waits")
    assert run.ready() == {"address": "127.0.0.1"}
    assert len(run.family()) > 5
    assert run.listens() <= LOOPBACK


@pytest.mark.parametrize(("mode", "code"), [("ends", 0), ("stops", 0), ("raises", 1), ("forgets", 3)])
def test_no_process_or_file_is_left(driver, mode, code):
    run = driver(mode)
    out, err = run.process.communicate(timeout=300)
    assert run.process.returncode == code, err
    assert ("ended" in out) == (code == 0)
    assert "usage" not in out + err
    assert "dashboard" not in out + err
    run.leaves_nothing()


def test_no_process_or_file_is_left_after_ctrl_c(driver):
    """The run also shows the output of workers, with their names."""
    run = driver("shows")
    run.ready()
    assert any("policy rank 0" in x and "hello from a worker" in x for x in run.process.stdout)
    os.killpg(run.process.pid, signal.SIGINT)  # a terminal sends it to the whole group too
    _, err = run.process.communicate(timeout=180)
    assert "KeyboardInterrupt" in err
    assert "WorkerError" not in err
    run.leaves_nothing()


@pytest.mark.parametrize("way", ["option", "environment"])
def test_a_missing_cluster_is_refused(driver, way):
    start = time.monotonic()
    place = "127.0.0.1:1"
    run = driver("ends", place) if way == "option" else driver("ends", RAY_ADDRESS=place)
    _, err = run.process.communicate(timeout=180)
    assert "ConfigError: no Ray cluster answers at launcher.address = '127.0.0.1:1': Connection refused." in err
    assert "ray start --head" in err
    assert time.monotonic() - start < 90


def test_a_port_of_another_program_is_refused(driver):
    """Ray would try to connect for minutes."""
    with http.server.HTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        place = f"127.0.0.1:{server.server_port}"
        _, err = driver("ends", place).process.communicate(timeout=90)
        server.shutdown()
    assert f"launcher.address = '{place}': another program than Ray's control process (GCS, port 6379" in err
