"""`deploy/slurm/train.sbatch`, executed with stand-ins for SLURM's programs."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rlhf_testing.tiny import tiny_model

from tests.members import ROOT

pytestmark = pytest.mark.full

DEPLOY = ROOT / "deploy"
SBATCH = DEPLOY / "slurm" / "train.sbatch"

STANDINS = {
    "scontrol": """
        if [ "$1" = show ]; then printf '%s\\n' $TEST_HOSTS; else echo "scontrol $*" >>"$TEST_LOG"; fi
    """,
    # A step: the command once for each of its nodes, here. As SLURM's own it passes SIGTERM on.
    "srun": """
        nodes=$TEST_HOSTS
        while [ "${1#--}" != "$1" ]; do
            case $1 in
            --nodelist=*) nodes=${1#*=} ;;
            --exclude=*) nodes=$(printf '%s\\n' $TEST_HOSTS | grep -vx "${1#*=}") ;;
            esac
            shift
        done
        pids=
        trap 'kill -TERM $pids' TERM
        for node in $nodes; do TEST_NODE=$node "$@" & pids="$pids $!"; done
        status=0
        for pid in $pids; do
            while kill -0 $pid 2>/dev/null; do wait $pid && status=0 || status=$?; done
        done
        exit $status
    """,
    "hostname": """echo "::1 127.0.0.1 10.9.9.9" """,
    "ray": """
        echo "ray $TEST_NODE $*" >>"$TEST_LOG"
        echo "token $(stat -c %a "$RAY_AUTH_TOKEN_PATH") $(wc -c <"$RAY_AUTH_TOKEN_PATH") $RAY_AUTH_MODE" >>"$TEST_LOG"
        trap 'echo "ray $TEST_NODE ended" >>"$TEST_LOG"; exit 0' TERM
        touch "$TEST_LOG.$TEST_NODE"
        [ -z "${TEST_RAY_DIES:-}" ] || exit 1
        while true; do sleep 0.05; done
    """,
    # Asked how many nodes have joined; $3 is how many are wanted.
    "python": """
        [ "$1" = -c ] || exit 9
        [ "$(ls "$TEST_LOG".node-* 2>/dev/null | wc -l)" -ge "$3" ]
    """,
    "rlhf": """
        words="$*"
        while [ "$1" != --output ]; do shift; done
        mkdir -p "$2"; touch "$2/config.toml"
        trap 'sleep 0.3; echo "rlhf saved" >>"$TEST_LOG"; echo "stopped: $2"; exit 143' TERM
        [ -z "${TEST_RLHF_UNTRAPPED:-}" ] || trap - TERM
        echo "rlhf $RAY_ADDRESS $words" >>"$TEST_LOG"
        echo "step 1"
        [ -n "${TEST_RLHF_RUNS:-}" ] || { echo "finished: $2"; exit ${TEST_RLHF_EXIT:-0}; }
        while true; do sleep 0.05; done
    """,
}


class Slurm:
    """Runs the script like SLURM's batch step. ``log``: the calls of the stand-ins."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tools = folder / "tools"
        self.tools.mkdir()
        for name, text in STANDINS.items():
            (self.tools / name).write_text(f"#!/bin/bash\n{text}")
            (self.tools / name).chmod(0o755)
        self.job = int(time.time_ns() // 1000 % 10**9)
        self.output = folder / "out"
        self.started: list[subprocess.Popen[str]] = []

    @property
    def log(self) -> list[str]:
        path = self.folder / "log"
        return path.read_text().splitlines() if path.exists() else []

    def start(self, *words: str, hosts: str = "node-a node-b node-c", **environment: str) -> subprocess.Popen[str]:
        for mark in self.folder.glob("log*"):
            mark.unlink()
        slurm = {"JOB_NODELIST": "node-[a-c]", "JOB_ID": str(self.job), "JOB_NAME": "try", "CPUS_ON_NODE": "2"}
        process = subprocess.Popen(
            ["bash", SBATCH, *words],
            cwd=self.folder,
            env={
                **{k: v for k, v in os.environ.items() if not k.startswith(("RAY_", "RLHF_"))},
                **{f"SLURM_{k}": v for k, v in slurm.items()},
                "PATH": f"{self.tools}{os.pathsep}{os.environ['PATH']}",
                "TEST_HOSTS": hosts,
                "TEST_LOG": str(self.folder / "log"),
                "RLHF_OUTPUT": str(self.output),
                **environment,
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.started.append(process)
        return process

    def run(self, *words: str, **variables: str) -> tuple[int, str, str]:
        process = self.start(*words, **variables)
        out, err = process.communicate(timeout=600)
        return process.returncode, out, err

    def until(self, text: str) -> None:
        deadline = time.monotonic() + 120
        while not any(text in line for line in self.log):
            assert time.monotonic() < deadline, self.log
            time.sleep(0.05)


@pytest.fixture
def slurm(tmp_path):
    slurm = Slurm(tmp_path)
    yield slurm
    for _ in range(100):  # what was told to end ends in a moment
        left = subprocess.run(["pgrep", "-f", str(tmp_path)], capture_output=True, text=True, check=False).stdout
        if not left:
            break
        time.sleep(0.1)
    for process in slurm.started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    assert left == "", "a process was left behind"


def test_slurm_starts_ray_on_every_node_and_the_run_beside_the_head(slurm):
    code, out, err = slurm.run("run.toml", "--run.seed", "3")
    assert code == 0, err
    port = 20000 + slurm.job % 10000
    address = f"127.0.0.1:{port}"
    started = [line for line in slurm.log if " start " in line]
    assert started[0] == (
        f"ray node-a start --head --block --node-ip-address=127.0.0.1 --port={port} --include-dashboard=false "
        f"--temp-dir=/tmp/ray-{slurm.job}"
    )
    assert sorted(started[1:]) == [f"ray node-{n} start --block --address={address}" for n in "bc"]
    [run] = [line for line in slurm.log if line.startswith("rlhf ")]
    assert run == (
        f"rlhf {address} train --backend ray --launcher.address auto --output {slurm.output} run.toml --run.seed 3"
    )
    assert [line for line in slurm.log if line.startswith("token")] == ["token 600 64 token"] * 3
    assert slurm.log.index(run) > max(slurm.log.index(line) for line in started), "the run comes after the nodes"
    assert sorted(line for line in slurm.log if "ended" in line) == [f"ray node-{n} ended" for n in "abc"]
    assert out == f"step 1\nfinished: {slurm.output}\n"
    assert f"3 nodes, Ray head on node-a ({address})" in err
    assert sorted(p.name for p in slurm.folder.iterdir() if not p.name.startswith("log")) == ["out", "tools"]


def test_slurm_on_one_node(slurm):
    code, _, err = slurm.run("run.toml", hosts="node-a")
    assert code == 0, err
    assert len([line for line in slurm.log if " start " in line]) == 1


def test_the_time_limit_saves_and_queues_again(slurm):
    process = slurm.start("run.toml", TEST_RLHF_RUNS="yes")
    slurm.until("rlhf ")
    process.send_signal(signal.SIGTERM)
    time.sleep(0.1)
    process.send_signal(signal.SIGTERM)  # a second one changes nothing
    _, err = process.communicate(timeout=180)
    assert process.returncode == 0, err
    ends = [line for line in slurm.log if not line.startswith(("token", "ray")) or "ended" in line]
    assert ends[1] == "rlhf saved", "before Ray ends"
    assert ends[-1] == f"scontrol requeue {slurm.job}", "after everything else"
    assert len(ends) == 6, ends
    code, _, err = slurm.run("run.toml", SLURM_RESTART_COUNT="1")
    assert code == 0, err
    [run] = [line for line in slurm.log if line.startswith("rlhf ")]
    assert run.endswith(f"--output {slurm.output} --resume run.toml")


def test_a_restart_before_the_run_began_resumes_nothing(slurm):
    code, _, err = slurm.run("run.toml", SLURM_RESTART_COUNT="1")
    assert code == 0, err
    assert not any("--resume" in line for line in slurm.log)


def test_the_time_limit_before_the_first_step_queues_again(slurm):
    process = slurm.start("run.toml", TEST_RLHF_RUNS="yes", TEST_RLHF_UNTRAPPED="yes")
    slurm.until("rlhf ")
    time.sleep(0.2)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=180)
    assert process.returncode == 0
    assert slurm.log[-1] == f"scontrol requeue {slurm.job}"


def test_the_time_limit_while_ray_starts_queues_again(slurm):
    (slurm.tools / "python").write_text("#!/bin/bash\nexit 1\n")
    process = slurm.start("run.toml")
    slurm.until(" start ")
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=180)
    assert process.returncode == 0
    assert slurm.log[-1] == f"scontrol requeue {slurm.job}"
    assert not any(line.startswith("rlhf") for line in slurm.log)


def test_stopping_by_hand_saves_and_does_not_queue_again(slurm):
    process = slurm.start("run.toml", TEST_RLHF_RUNS="yes")
    slurm.until("rlhf ")
    process.send_signal(signal.SIGUSR1)
    process.communicate(timeout=180)
    assert process.returncode == 0
    assert "rlhf saved" in slurm.log
    assert not any("requeue" in line for line in slurm.log)


def test_a_run_that_fails_ends_the_job_with_its_exit_code(slurm):
    assert slurm.run("run.toml", TEST_RLHF_EXIT="3")[0] == 3
    assert not any("requeue" in line for line in slurm.log)
    assert sorted(line for line in slurm.log if "ended" in line) == [f"ray node-{n} ended" for n in "abc"]


def test_a_run_that_finishes_as_the_signal_comes_is_not_queued_again(slurm):
    text = STANDINS["rlhf"].replace('echo "stopped: $2"; exit 143', 'echo "finished: $2"; exit 0')
    (slurm.tools / "rlhf").write_text(f"#!/bin/bash\n{text}")
    process = slurm.start("run.toml", TEST_RLHF_RUNS="yes")
    slurm.until("rlhf ")
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=180)
    assert process.returncode == 0
    assert not any("requeue" in line for line in slurm.log)


def test_a_ray_that_dies_at_the_start_ends_the_job(slurm):
    (slurm.tools / "python").write_text("#!/bin/bash\nexit 1\n")
    code, _, err = slurm.run("run.toml", TEST_RAY_DIES="yes")
    assert code == 1
    assert "a Ray node ended while the cluster started" in err


def test_nodes_that_never_join_end_the_job(slurm):
    (slurm.tools / "python").write_text(
        """#!/bin/bash
        [ "$3" = 1 ] && exit 0
        until [ -e "$TEST_LOG.node-a" ] && [ -e "$TEST_LOG.node-b" ] && [ -e "$TEST_LOG.node-c" ]; do sleep 0.05; done
        echo "2 nodes have joined"; exit 1
        """
    )
    code, _, err = slurm.run("run.toml", RLHF_START="2")
    assert code == 1
    assert "not 3 Ray nodes within 2 s" in err
    assert "2 nodes have joined" in err
    assert sorted(line for line in slurm.log if "ended" in line) == [f"ray node-{n} ended" for n in "abc"]


FLAGS = (["--output", "x"], ["--resume"], ["--overwrite"], ["--run.overwrite=true"])


@pytest.mark.parametrize("words", [[], *(["run.toml", *flags] for flags in FLAGS)])
def test_options_that_the_slurm_script_sets_are_refused_as_flags(slurm, words):
    code, _, err = slurm.run(*words)
    assert code == 2
    assert "train.sbatch: " in err
    assert slurm.log == []


# ----------------------------------------------------------------------------------------------- real

RAY = """
    # The node's own address, and a small object store; all else as the script says.
    words=(--num-cpus=1 --object-store-memory=80000000)
    [ "$TEST_NODE" = node-a ] || words+=(--node-ip-address=127.0.0.2)
    exec {ray} "$@" "${{words[@]}}"
"""


@pytest.mark.slow
@pytest.mark.cluster
def test_a_run_over_two_ray_nodes_is_stopped_at_the_time_limit_and_resumed(slurm):
    """Ray, the launcher, DeepSpeed with a rank on each node and the run are real; SLURM is not."""
    for name in ("ray", "python", "rlhf"):
        (slurm.tools / name).unlink()
    binaries = Path(sys.executable).parent
    real = {"ray": RAY.format(ray=binaries / "ray")} | {n: f'exec {binaries / n} "$@"' for n in ("python", "rlhf")}
    for name, text in real.items():
        (slurm.tools / name).write_text(f"#!/bin/bash\n{text}\n")
        (slurm.tools / name).chmod(0o755)
    tiny_model(slurm.folder / "model")
    rows = [{"prompt": f"{n}+1=", "response": str(n + 1)} for n in range(64)]
    (slurm.folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (slurm.folder / "run.toml").write_text(
        'algorithm = "sft"\n[policy]\nmodel = "model"\n[data]\ntrain = "rows.jsonl"\nbatch_size = 4\n'
        '[placement.policy]\nranks = 2\n[launcher]\nuse = "ray"\nstrategy = "STRICT_SPREAD"\n'
    )
    variables = {"hosts": "node-a node-b", "OMP_NUM_THREADS": "1", "RAY_worker_niceness": "0"}
    metrics = slurm.output / "metrics.jsonl"

    def steps() -> list[int]:
        return [json.loads(line)["step"] for line in metrics.read_text().splitlines()] if metrics.exists() else []

    process = slurm.start("run.toml", "--run.steps", "100000", **variables)
    deadline = time.monotonic() + 600
    while len(steps()) < 3:
        if process.poll() is not None or time.monotonic() > deadline:
            os.killpg(process.pid, signal.SIGKILL)
            pytest.fail("".join(process.communicate()))
        time.sleep(0.2)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    resume = f"rlhf train {slurm.output}/config.toml --resume"
    assert out.splitlines()[-2] == f"stopped: {slurm.output} (continue with: {resume})"
    assert slurm.log[-1] == f"scontrol requeue {slurm.job}"
    done = steps()
    assert done == list(range(1, len(done) + 1))
    [saved] = (slurm.output / "checkpoints").glob("step-*")
    assert saved.name == f"step-{done[-1]:06d}", "the current step was finished and saved"

    code, out, err = slurm.run("run.toml", "--run.steps", str(done[-1] + 3), SLURM_RESTART_COUNT="1", **variables)
    assert code == 0, err
    assert out.splitlines()[-2] == f"finished: {slurm.output}"
    assert f"resumed after step {done[-1]}" in out
    assert steps() == list(range(1, done[-1] + 4)), "no step lost or done twice"
    assert not any("requeue" in line for line in slurm.log)
