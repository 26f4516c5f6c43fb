"""The check `ray` of `rlhf doctor`: a Ray of two nodes on this machine, the second with another version of a plugin."""

import contextlib
import importlib.metadata
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from rlhf.interfaces import Examination
from rlhf_cli.doctor.child import ask
from rlhf_plugin_ray.checks.check import RayCheck, check_nodes, closed, cluster, installation
from rlhf_testing.check import CheckContract

pytestmark = pytest.mark.full

RAY = str(Path(sys.executable).parent / "ray")


def examination(paths=(), timeout=60.0, start=False):
    return Examination(
        lambda probe, argument=None: ask(probe, argument, timeout), timeout, start, shared_paths=tuple(paths)
    )


def start(address, *flags, environment):
    """``ray start`` in a process group of its own."""
    words = [RAY, "start", "--block", "--num-cpus=1", "--object-store-memory=80000000", "--disable-usage-stats"]
    return subprocess.Popen(
        [*words, *flags, f"--node-ip-address={address}"],
        env=environment,
        start_new_session=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def end(process):
    """Run ``ray stop``, and kill what is left of the process group."""
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(30)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


@pytest.fixture(scope="module")
def nodes(tmp_path_factory):
    """The address of a cluster of two nodes that requires a token, like one on a shared network."""
    folder = tmp_path_factory.mktemp("ray")
    (folder / "token").write_text("0123456789abcdef" * 4)
    (folder / "other" / "rlhf_plugin_math-9.9.dist-info").mkdir(parents=True)
    metadata = "Metadata-Version: 2.1\nName: rlhf-plugin-math\nVersion: 9.9\n"
    (folder / "other" / "rlhf_plugin_math-9.9.dist-info" / "METADATA").write_text(metadata)
    auth = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(folder / "token")}
    environment = {**os.environ, **auth}
    address = f"127.0.0.1:{free_port()}"
    port = address.rpartition(":")[2]
    temporary = f"/tmp/rlhf-doctor-{os.getpid()}"  # short: sockets in it may have 107 characters
    words = ["--head", f"--port={port}", "--include-dashboard=false", f"--temp-dir={temporary}"]
    started = [start("127.0.0.1", *words, environment=environment)]
    try:
        deadline = time.monotonic() + 60
        while closed(address, 1):
            assert time.monotonic() < deadline, "Ray's head did not start"
            time.sleep(0.2)
        other = {**environment, "PYTHONPATH": str(folder / "other")}
        started.append(start("127.0.0.2", f"--address={address}", environment=other))
        with pytest.MonkeyPatch.context() as patch:
            for name, value in auth.items():
                patch.setenv(name, value)
            text = ""
            while "2 nodes" not in text:
                assert time.monotonic() < deadline, f"the second node did not start: {text}"
                text = check_nodes(examination(), address)[0].text
            yield address
    finally:
        for process in reversed(started):
            end(process)
        subprocess.run(["rm", "-rf", temporary], check=True)


@pytest.mark.slow
@pytest.mark.cluster
def test_nodes_with_other_versions_or_missing_files_are_named(nodes, tmp_path):
    reached, versions, files = check_nodes(examination([str(tmp_path), "/no/such/place"]), nodes)
    assert (reached.name, reached.status) == ("ray cluster", "ok")
    assert reached.text.startswith(f"{nodes}: 2 nodes, CPU 2, GPU 0, reached in ")
    assert (versions.name, versions.status) == ("ray nodes", "fail")
    [line] = versions.text.splitlines()
    assert "(127.0.0.2, " in line
    version = importlib.metadata.version("rlhf-plugin-math")
    assert line.endswith(f"rlhf-plugin-math 9.9 there, {version} here")
    assert (files.name, files.status) == ("ray files", "fail")
    assert [line.rpartition(": ")[2] for line in files.text.splitlines()] == ["/no/such/place"] * 2


@pytest.mark.slow
@pytest.mark.cluster
def test_a_cluster_that_refuses_the_token_is_reported(nodes, tmp_path, monkeypatch):
    (tmp_path / "token").write_text("fedcba9876543210" * 4)
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "token"))
    reached, versions = check_nodes(examination(), nodes)
    assert (reached.status, versions.status) == ("fail", "skipped")
    assert "Authentication" in reached.text, reached.text
    assert "RAY_AUTH_MODE=token" in reached.remedy


@pytest.mark.slow
@pytest.mark.cluster
def test_a_run_that_sends_no_token_is_told_how_to_send_it(tmp_path, monkeypatch):
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)  # the cluster of the other tests may be there
    (tmp_path / "token").write_text("0123456789abcdef" * 4)
    environment = {**os.environ, "RAY_AUTH_TOKEN_PATH": str(tmp_path / "token")}
    port, temporary = free_port(), f"/tmp/rlhf-token-{os.getpid()}"
    words = ["--head", f"--port={port}", "--include-dashboard=false", f"--temp-dir={temporary}"]
    head = start("127.0.0.1", *words, environment={**environment, "RAY_AUTH_MODE": "token"})
    imports = "import sys; from rlhf_plugin_ray import config; from rlhf_plugin_ray.cluster.connection import Cluster"
    program = [sys.executable, "-c", f"{imports}; Cluster(config.RayConfig(address=sys.argv[1]))", f"127.0.0.1:{port}"]
    try:
        deadline = time.monotonic() + 60
        while closed(f"127.0.0.1:{port}", 1):
            assert time.monotonic() < deadline, "Ray's head did not start"
            time.sleep(0.2)
        run = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=180, check=False)
    finally:
        end(head)
        subprocess.run(["rm", "-rf", temporary], check=True)
    assert "ConfigError: no Ray cluster answers at launcher.address = '127.0.0.1:" in run.stderr
    assert "InvalidAuthToken" in run.stderr
    assert "export RAY_AUTH_MODE=token" in run.stderr


def test_a_closed_port_is_reported():
    address = f"127.0.0.1:{free_port()}"
    reached, nodes = check_nodes(examination(), address)
    assert (reached.status, reached.text) == ("fail", f"{address}: Connection refused")
    assert "ray start --head" in reached.remedy
    assert nodes.status == "skipped"
    assert closed(f"ray://{address}", 1) == f"ray://{address}: Connection refused"


def test_a_port_of_another_program_is_reported():
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        assert closed(address, 1) == ""
        reached, nodes = check_nodes(examination(timeout=6), address)
    assert (reached.status, nodes.status) == ("fail", "skipped")
    assert reached.text.startswith(f"{address}: ")
    assert "RAY_AUTH_MODE=token" in reached.remedy


def test_a_host_name_that_does_not_resolve_is_reported():
    assert "no-such-host.invalid:6379: " in closed("no-such-host.invalid:6379", 1)
    assert closed("auto", 1) == ""


@pytest.mark.slow
@pytest.mark.cluster
def test_the_check_starts_and_stops_a_ray():
    [installed, started] = installation(examination(timeout=120, start=True))
    assert (installed.status, started.status) == ("ok", "ok"), started.text
    assert started.text.startswith("started, ran a task and stopped")


def test_the_address_in_the_environment_is_used_and_not_shown(monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    findings = list(cluster(examination()))
    assert [(f.name, f.status) for f in findings] == [("ray cluster", "fail"), ("ray nodes", "skipped")]
    assert findings[0].text == "$RAY_ADDRESS: Connection refused"
    [other] = cluster(replace(examination(), launcher="local"))
    assert (other.status, other.text) == ("skipped", "the run's launcher is 'local'")
    assert [f.status for f in cluster(replace(examination(), launcher="ray"))] == ["fail", "skipped"]
    settings = replace(examination(), launcher="ray", launcher_options={"address": "127.0.0.1:2"})
    assert next(iter(cluster(settings))).text == "127.0.0.1:2: Connection refused"
    monkeypatch.delenv("RAY_ADDRESS")
    [none] = cluster(replace(examination(), launcher="ray"))
    assert (none.status, none.text) == ("skipped", "no address given; --launcher.address HOST:PORT checks a cluster")


class TestRayCheck(CheckContract):
    check = RayCheck
    finds = ["ray", "ray start", "ray cluster"]
