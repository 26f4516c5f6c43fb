"""Whole runs in processes without Ray, with vLLM and DeepSpeed: killed workers, a stop, and a killed driver."""

from __future__ import annotations

import signal
from pathlib import Path

import psutil
import pytest
from rlhf_runtime.output.metrics import read_metrics

from tests.forks import Forks
from tests.runs import Finished, Workshop, merged
from tests.test_cluster_runs import CLUSTER, Training, kill_workers_and_resume, undisturbed_run

pytestmark = [pytest.mark.slow, pytest.mark.cluster, pytest.mark.full]

PROCESSES = {**CLUSTER, "launcher": {"use": "processes", "cpus": 2}}


@pytest.fixture(scope="module")
def undisturbed(forks: Forks, place: Workshop) -> Training:
    return undisturbed_run(forks, place, PROCESSES)


def leaves_nothing(run: Training) -> None:
    assert psutil.wait_procs(run.started, timeout=30)[1] == []


def test_a_run_is_the_run_on_ray(forks, place, undisturbed):
    on_ray = Training(forks, place, place.config("grpo", "on ray", **CLUSTER)).finish()
    run = Finished(undisturbed.output, 0)
    assert on_ray.code == 0, on_ray.said
    assert run.rollouts() == on_ray.rollouts()
    assert run.weights == on_ray.weights
    assert all(line["sync/canary"] < 1e-5 for line in run.lines())
    for line in read_metrics(run.path / "metrics.jsonl"):
        assert {f"memory/{name}/process" for name in ("driver", "policy", "generator")} <= line.keys()
    leaves_nothing(undisturbed)


def test_killed_workers_change_no_number(forks, place, undisturbed):
    run, rank = kill_workers_and_resume(forks, place, PROCESSES, Finished(undisturbed.output, 0))
    assert f"(node 127.0.0.1, pid {rank.pid}) died during" in run.said()
    leaves_nothing(run)


def test_a_stopped_run_saves_and_resumes(forks, place, undisturbed):
    config = place.config("grpo", "stopped", **merged(PROCESSES, {"checkpoint": {"every": 100}}))
    run = Training(forks, place, config)
    run.wait_for_step(2)
    run.process.kill(signal.SIGTERM)
    stopped = run.finish()
    assert stopped.code == 128 + signal.SIGTERM, stopped.said
    leaves_nothing(run)
    resumed = Training(forks, place, config, "--resume").finish()
    assert resumed.code == 0, resumed.said
    assert resumed.weights == Finished(undisturbed.output, 0).weights


def test_no_process_outlives_a_killed_driver(forks, place):
    run = Training(forks, place, place.config("grpo", "orphans", **PROCESSES))
    run.wait_for_step(1)
    assert run.lives()
    assert len(run.workers(engines=False)) == 2
    run.process.kill(signal.SIGKILL)
    assert run.process.wait() == -signal.SIGKILL
    leaves_nothing(run)
    logs = Path(run.output, "workers")
    assert {p.name for p in logs.iterdir()} == {"policy-0.log", "policy-1.log", "engine-0.log"}
