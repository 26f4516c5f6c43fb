"""`deploy/ray/submit.sh`: its arguments, and a real job if Ray's job server is installed. Also checks of all scripts in
`deploy/`."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.members import ROOT

DEPLOY = ROOT / "deploy"
SUBMIT = DEPLOY / "ray" / "submit.sh"
RUNTIME_ENV = DEPLOY / "ray" / "runtime-env.yaml"
SCRIPTS = sorted([*DEPLOY.rglob("*.sh"), *DEPLOY.rglob("*.sbatch")])
BIN = Path(sys.executable).parent
SUBREAPER = "RAY_kill_child_processes_on_worker_exit_with_raylet_subreaper"


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda p: p.name)
def test_scripts_are_bash(script):
    done = subprocess.run(["bash", "-n", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert os.access(script, os.X_OK)
    assert "set -euo pipefail" in script.read_text()


def submit(*words, path, cwd, **environment):
    base = {k: v for k, v in os.environ.items() if not k.startswith(("RLHF_", "RAY_"))}
    return subprocess.run(
        [SUBMIT, *words],
        env={**base, "PATH": f"{path}{os.pathsep}{os.environ['PATH']}", **environment},
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture
def ray_standin(tmp_path):
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "ray").write_text('#!/bin/sh\nfor word; do echo "$word"; done\n')
    (tools / "ray").chmod(0o755)
    return tools


def test_the_command_line_of_a_submission(ray_standin, tmp_path):
    done = submit("run.toml", "--run.name", "two words", path=ray_standin, cwd=tmp_path, RLHF_OUTPUT="/shared/a b")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        *("job", "submit", "--address", "http://127.0.0.1:8265", "--working-dir", str(tmp_path)),
        *("--runtime-env", str(RUNTIME_ENV), "--", "rlhf", "train", "--backend", "ray", "--launcher.address", "auto"),
        *("--output", "/shared/a b", "run.toml", "--run.name", "two words"),
    ]
    variables = {"RLHF_JOB": "night", "RLHF_WAIT": "no", "RAY_API_SERVER_ADDRESS": "http://127.0.0.1:9999"}
    words = submit("run.toml", path=ray_standin, cwd=tmp_path, RLHF_OUTPUT="/s", **variables).stdout.splitlines()
    assert words[words.index("--submission-id") + 1] == "night"
    assert words[words.index("--address") + 1] == "http://127.0.0.1:9999"
    assert words.index("--no-wait") < words.index("--")


@pytest.mark.parametrize(("words", "output"), [((), "/shared"), (("run.toml",), ""), (("run.toml",), "runs/one")])
def test_a_submission_without_a_run_or_a_shared_place_is_refused(ray_standin, tmp_path, words, output):
    done = submit(*words, path=ray_standin, cwd=tmp_path, RLHF_OUTPUT=output)
    assert (done.returncode, done.stdout) == (2, "")
    assert "RLHF_OUTPUT" in done.stderr


# ----------------------------------------------------------------------------------------------- real

STANDIN = """#!/bin/bash
# Says what it was called with and where; ends upon SIGTERM only after longer than Ray leaves a job by default.
echo "called: $*"
echo "address: $RAY_ADDRESS"
echo "here: $(ls | tr '\\n' ' ')"
trap 'sleep 5; echo saved >{saved}; exit 0' TERM
[ "${{@: -1}}" != failing.toml ] || exit 3
[ "${{@: -1}}" != endless.toml ] || while true; do sleep 0.1; done
"""


@pytest.fixture
def job_server(tmp_path):
    """(address, environment) of a Ray on this machine with a job server and a token. Its jobs use the stand-in for
    ``rlhf``."""
    if missing := [m for m in ("aiohttp_cors", "opencensus", "smart_open") if importlib.util.find_spec(m) is None]:
        pytest.skip(f"needs ray[default]: {', '.join(missing)} are not installed")
    ports = []
    for _ in range(3):
        with socket.create_server(("127.0.0.1", 0)) as server:
            ports.append(server.getsockname()[1])
    (tmp_path / "token").write_text("0123456789abcdef" * 4)
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools" / "rlhf").write_text(STANDIN.format(saved=tmp_path / "saved"))
    (tmp_path / "tools" / "rlhf").chmod(0o755)
    environment = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(tmp_path / "token")}
    temporary = f"/tmp/rlhf-jobs-{os.getpid()}"  # short: sockets in it may have 107 characters
    words = ["start", "--head", "--block", "--num-cpus=2", f"--port={ports[0]}", f"--dashboard-port={ports[1]}"]
    words.append(f"--dashboard-agent-listen-port={ports[2]}")  # else every Ray of the machine wants one and the same
    words += ["--dashboard-host=127.0.0.1", "--node-ip-address=127.0.0.1", f"--temp-dir={temporary}"]
    with (tmp_path / "head.log").open("w") as log:
        head = subprocess.Popen(
            [BIN / "ray", *words, "--object-store-memory=80000000", "--disable-usage-stats"],
            env={
                **os.environ,
                **environment,
                SUBREAPER: "true",  # as on the nodes of the page on clusters
                "PATH": os.pathsep.join([f"{tmp_path}/tools", f"{BIN}", os.environ["PATH"]]),
            },
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        deadline = time.monotonic() + 240
        while True:
            with contextlib.suppress(OSError):
                socket.create_connection(("127.0.0.1", ports[1]), 1).close()
                break
            assert time.monotonic() < deadline, (tmp_path / "head.log").read_text()[-2000:]
            time.sleep(0.2)
        yield f"http://127.0.0.1:{ports[1]}", environment
    finally:
        head.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            head.wait(30)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(head.pid, signal.SIGKILL)
        head.wait()
        subprocess.run(["rm", "-rf", temporary], check=True)


@pytest.mark.slow
@pytest.mark.cluster
@pytest.mark.full
def test_a_real_job_is_submitted_and_stopped(job_server, tmp_path):
    address, environment = job_server
    environment = {**environment, "RAY_API_SERVER_ADDRESS": address, "RLHF_OUTPUT": "/shared/one"}
    work = tmp_path / "work"
    (work / "runs").mkdir(parents=True)
    (work / "run.toml").write_text("")
    (work / "model.safetensors").write_text("large")
    deadline = time.monotonic() + 240
    while True:  # Ray's job server listens before the agent that starts jobs has come up, and says so
        done = submit("run.toml", path=BIN, cwd=work, **environment)
        if "No available agent" not in done.stdout + done.stderr or time.monotonic() > deadline:
            break
        time.sleep(0.5)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "called: train --backend ray --launcher.address auto --output /shared/one run.toml" in done.stdout
    assert "here: run.toml \n" in done.stdout, "what is excluded stayed behind"
    assert "succeeded" in done.stdout
    done = submit("failing.toml", path=BIN, cwd=work, **environment)
    assert done.returncode != 0, "Ray has the exit code of the run"
    assert "exit code 3" in done.stdout + done.stderr
    done = submit("endless.toml", path=BIN, cwd=work, **environment, RLHF_JOB="endless", RLHF_WAIT="no")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]

    def job(action):
        words = [BIN / "ray", "job", action, "--address", address, "endless"]
        return subprocess.run(
            words, env={**os.environ, **environment}, capture_output=True, text=True, check=True
        ).stdout

    deadline = time.monotonic() + 180
    while "called" not in job("logs"):
        assert time.monotonic() < deadline
        time.sleep(0.5)
    job("stop")
    assert (tmp_path / "saved").read_text() == "saved\n", "the job got more time than Ray's default of 3 seconds"
