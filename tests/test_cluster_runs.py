"""Whole runs on Ray with vLLM and DeepSpeed: they learn, survive killed workers, and resume exactly.

There are no stand-ins: engines and ranks are real processes, and some are killed.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from rlhf_runtime.output.metrics import read_metrics

from tests.continuous import check_ledger
from tests.forks import Forks
from tests.runs import Finished, Workshop, merged, require

pytestmark = [pytest.mark.slow, pytest.mark.cluster]

require("ray", "vllm", "deepspeed")

SHARED = {"policy": {"ranks": 2}, "generator": {"ranks": 1, "share": "policy"}}
CLUSTER: dict[str, Any] = {
    "launcher": {"use": "ray", "cpus": 2},
    "trainer": {"use": "deepspeed", "stage": 3, "lr": 1e-3},
    "generator": {"use": "vllm", "kv_cache_gib": 0.25},
    "placement": SHARED,
    "run": {"steps": 6},
    "checkpoint": {"every": 2},
}


class Training:
    """``rlhf train`` in its own process, with all processes that it starts."""

    def __init__(self, forks: Forks, shop: Workshop, config: dict[str, Any], *flags: str) -> None:
        self.output = Path(config["run"]["output"])
        self.process = forks.start(shop.arguments(config, *flags))
        self.started: set[psutil.Process] = set()
        """All processes of the run that were observed, with the run itself."""

    def wait_for_step(self, step: int, seconds: float = 600) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            assert self.lives(), self.said()
            path = self.output / "metrics.jsonl"
            if path.exists() and len(read_metrics(path)) >= step:
                return
            time.sleep(0.1)
        raise AssertionError(f"no step {step} in {seconds} s:\n{self.said()}")

    def lives(self) -> bool:
        run = psutil.Process(self.process.pid)
        self.started |= {run, *run.children(recursive=True)}
        return run.status() != psutil.STATUS_ZOMBIE

    @contextmanager
    def held_after(self, step: int) -> Iterator[None]:
        """A context in which the run is stopped (SIGSTOP) soon after ``step``, so that it cannot finish meanwhile."""
        self.wait_for_step(step)
        self.process.kill(signal.SIGSTOP)
        try:
            yield
        finally:
            self.process.kill(signal.SIGCONT)

    def workers(self, engines: bool) -> list[psutil.Process]:
        """The processes of this run that hold models: engines, which have vLLM's library loaded, or ranks."""
        processes = []
        for process in psutil.Process(self.process.pid).children(recursive=True):
            with suppress(OSError, psutil.Error):  # it has ended
                maps = Path(f"/proc/{process.pid}/maps").read_text()
                command = " ".join(process.cmdline())
                is_worker = "ray::" in command or "worker_program.py" in command
                if "libtorch_cpu" in maps and is_worker and ("/vllm/" in maps) == engines:
                    processes.append(process)
        return processes

    def finish(self, seconds: float = 600) -> Finished:
        deadline = time.monotonic() + seconds
        while self.lives():
            if time.monotonic() > deadline:
                self.process.kill(signal.SIGABRT)
                raise AssertionError(f"still running after {seconds} s:\n{self.said()}")
            time.sleep(0.2)
        return Finished(self.output, self.process.wait(), self.said())

    def said(self) -> str:
        return self.process.output[-6000:]


def undisturbed_run(forks: Forks, place: Workshop, options: dict[str, Any]) -> Training:
    """A finished run without failures."""
    run = Training(forks, place, place.config("grpo", "whole", **options))
    finished = run.finish()
    assert finished.code == 0, finished.said
    return run


@pytest.fixture(scope="module")
def undisturbed(forks: Forks, place: Workshop) -> Training:
    return undisturbed_run(forks, place, CLUSTER)


@pytest.fixture(scope="module")
def whole(undisturbed: Training) -> Finished:
    return Finished(undisturbed.output, 0)


def indices(run: Finished) -> list[tuple[int, int]]:
    """(group, sample) of every sample in training, in order."""
    return [tuple(sample["index"]) for sample in run.samples()]


def test_a_run_learns_and_proves_every_sync(whole):
    lines = whole.lines()
    assert [line["sync/version"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert all(line["sync/canary"] < 1e-5 for line in lines)
    assert all(abs(line["policy/kl_generator"]) < 1e-8 for line in lines)  # sampled with the weights of now
    assert indices(whole) == [(g, s) for g in range(6 * 4) for s in range(3)]
    assert (whole.path / "model" / "config.json").exists()


def kill_workers_and_resume(
    forks: Forks, place: Workshop, options: dict[str, Any], baseline: Finished
) -> tuple[Training, psutil.Process]:
    """A killed engine is replaced. A killed rank ends the run with its cause, and the run resumes exactly. Two
    transports of weights are used: first a collective, then shared memory. Returns the failed run and the killed
    rank."""
    config = place.config("grpo", "killed", **options, sync={"transport": "broadcast"})
    run = Training(forks, place, config)
    with run.held_after(2):
        [engine] = run.workers(engines=True)
        engine.kill()
    with run.held_after(4):
        assert engine not in run.workers(engines=True)
        [_, rank] = run.workers(engines=False)
        rank.kill()
    failed = run.finish()
    assert failed.code == 1
    assert "engine 0" in failed.said
    assert "The engine is replaced" in failed.said
    assert "policy rank" in failed.said
    assert "Traceback" not in failed.said
    resumed = Training(forks, place, config, "--resume", "--sync.transport", "shared").finish()
    assert resumed.code == 0, resumed.said
    assert indices(resumed) == indices(baseline)
    assert resumed.rollouts() == baseline.rollouts()
    assert resumed.weights == baseline.weights
    return run, rank


@pytest.mark.full
def test_killed_workers_change_no_number(forks, place, whole):
    kill_workers_and_resume(forks, place, CLUSTER, whole)


def kill_a_rank_and_go_on_with_one(
    forks: Forks, place: Workshop, config: dict[str, Any], *flags: str, **options: Any
) -> Finished:
    """A run of four steps on two ranks, of which one is killed. One rank resumes it, with the changed ``options``."""
    run = Training(forks, place, config, *flags)
    with run.held_after(2):
        run.workers(engines=False)[1].kill()
    failed = run.finish()
    assert failed.code == 1, failed.said
    assert "policy rank" in failed.said
    assert "Traceback" not in failed.said
    single_rank = merged(config, {"placement": {"policy": {"ranks": 1}}, **options})
    resumed = Training(forks, place, single_rank, *flags, "--resume").finish()
    assert resumed.code == 0, resumed.said
    lines = resumed.lines()
    assert [line["sync/version"] for line in lines] == [1, 2, 3, 4]
    assert all(line["sync/canary"] < 1e-5 for line in lines)
    assert all(abs(line["policy/kl_generator"]) < 1e-8 for line in lines)  # sampled with the weights of now
    assert (resumed.path / "model" / "config.json").exists()
    return resumed


def test_no_process_and_file_of_a_run_is_left(undisturbed):
    assert len(undisturbed.started) > 5, "the command, Ray's own processes, an engine and two ranks"
    assert psutil.wait_procs(undisturbed.started, timeout=10)[1] == []


@pytest.mark.full
def test_a_continuous_run_survives_killed_workers(forks, place):
    """A killed engine is replaced while samples are under way. A killed rank ends the run, and the run resumes."""
    placement = {
        "launcher": {"cpus": 4},
        "placement": {"policy": {"ranks": 2}, "generator": {"share": None, "ranks": 2}},
        "stream": {"mode": "continuous", "staleness": 1},
        "algorithm": {"loss": {"correction": {"preset": "tis"}}},
        "data": {"batch_size": 2},
        "sampling": {"max_new_tokens": 50},
    }
    config = place.config("grpo", "continuous", **merged(CLUSTER, placement))
    run = Training(forks, place, config)
    with run.held_after(2):
        engine, _ = run.workers(engines=True)
        engine.kill()
    with run.held_after(4):
        run.workers(engines=False)[1].kill()
    failed = run.finish()
    assert failed.code == 1, failed.said
    assert "The engine is replaced" in failed.said
    assert "policy rank" in failed.said
    resumed = Training(forks, place, config, "--resume").finish()
    assert resumed.code == 0, resumed.said
    assert all(line["sync/canary"] < 1e-5 for line in resumed.lines())
    check_ledger(resumed, config)


@pytest.mark.full
def test_vllm_and_deepspeed_work_without_ray(forks, place):
    embedded = {"launcher": None, "placement": None, "trainer": {"use": "deepspeed", "stage": 2, "lr": 1e-3}}
    config = place.config("grpo", "embedded", **{**CLUSTER, **embedded, "run": {"steps": 2}})
    finished = Training(forks, place, config).finish()
    assert finished.code == 0, finished.said
    assert all(line["sync/canary"] < 1e-5 for line in finished.lines())
