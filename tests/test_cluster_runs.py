"""Whole runs on Ray with vLLM and DeepSpeed: they learn, survive what dies, and go on exactly where they stood.

Nothing is a stand-in here: engines and ranks are processes that are really killed.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from rlhf_runtime.observe import read_metrics
from rlhf_testing.tiny import tiny_model

from tests.runs import Finished, Workshop

pytestmark = [pytest.mark.slow, pytest.mark.cluster]

pytest.importorskip("ray")
pytest.importorskip("vllm")
pytest.importorskip("deepspeed")

SHARED = {"policy": {"ranks": 2}, "generator": {"share": "policy"}}
CLUSTER: dict[str, Any] = {
    "launcher": {"use": "ray", "cpus": 2},
    "trainer": {"use": "deepspeed", "stage": 3, "lr": 1e-3},
    "generator": {"use": "vllm", "kv_cache_gib": 0.25},
    "placement": SHARED,
    "run": {"steps": 6},
    "checkpoint": {"every": 2},
}


class Training:
    """``rlhf train`` in a process of its own, with everything that it starts."""

    def __init__(self, shop: Workshop, config: dict[str, Any], *flags: str) -> None:
        self.output = Path(config["run"]["output"])
        self.log = shop.folder / f"{self.output.name}.log"
        arguments = shop.arguments(config, *flags)
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "rlhf_cli.main", *arguments], stdout=log, stderr=log, start_new_session=True
            )

    def wait_for_step(self, step: int, seconds: float = 600) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            assert self.process.poll() is None, self.said()
            path = self.output / "metrics.jsonl"
            if path.exists() and len(read_metrics(path)) >= step:
                return
            time.sleep(0.05)
        raise AssertionError(f"no step {step} in {seconds} s:\n{self.said()}")

    @contextmanager
    def held_after(self, step: int) -> Iterator[None]:
        """Inside, the run stands still after ``step``, or soon: it cannot finish before it is interfered with."""
        self.wait_for_step(step)
        self.process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.process.send_signal(signal.SIGCONT)

    def workers(self, engines: bool) -> list[psutil.Process]:
        """The processes of this run that hold models: engines, which have vLLM's library loaded, or ranks."""
        found = []
        for process in psutil.Process(self.process.pid).children(recursive=True):
            with suppress(OSError, psutil.Error):  # it has ended
                maps = Path(f"/proc/{process.pid}/maps").read_text()
                if "libtorch_cpu" in maps and "ray::" in " ".join(process.cmdline()) and ("/vllm/" in maps) == engines:
                    found.append(process)
        return found

    def finish(self, seconds: float = 600) -> Finished:
        try:
            code = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.send_signal(signal.SIGABRT)
            raise AssertionError(f"still running after {seconds} s:\n{self.said()}") from None
        return Finished(self.output, code, self.said())

    def said(self) -> str:
        return self.log.read_text()[-6000:]


@pytest.fixture(scope="module")
def place(tiny: Workshop, tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    """vLLM's attention on a CPU wants heads of 32 or more."""
    folder = tmp_path_factory.mktemp("cluster")
    return Workshop(folder, tiny_model(folder / "tiny", hidden=32, heads=2, kv_heads=1, head_dim=32), tiny.data)


@pytest.fixture(scope="module")
def whole(place: Workshop) -> Finished:
    """The run that nothing happens to."""
    finished = Training(place, place.config("grpo", "whole", **CLUSTER)).finish()
    assert finished.code == 0, finished.said
    return finished


def indices(run: Finished) -> list[tuple[int, int]]:
    """(group, sample) of every sample that was trained on, in order."""
    lines = (line for file in sorted((run.path / "rollouts").glob("*.jsonl")) for line in file.read_text().splitlines())
    return [tuple(json.loads(line)["index"]) for line in lines]


def test_a_run_learns_and_proves_every_sync(whole):
    lines = whole.lines()
    assert [line["sync/version"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert all(line["sync/canary"] < 1e-5 for line in lines)
    assert all(abs(line["policy/kl_generator"]) < 1e-8 for line in lines)  # sampled with the weights of now
    assert indices(whole) == [(g, s) for g in range(6 * 4) for s in range(3)]
    assert (whole.path / "model" / "config.json").exists()


def test_what_is_killed_changes_nothing(place, whole):
    """An engine, which is replaced, and later a rank, which ends the run with its cause; it resumes exactly. Nor does
    the way of the weights: a collective at first, then memory that both sides map."""
    config = place.config("grpo", "killed", **CLUSTER, sync={"transport": "broadcast"})
    run = Training(place, config)
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
    resumed = Training(place, config, "--resume", "--sync.transport", "shared").finish()
    assert resumed.code == 0, resumed.said
    assert indices(resumed) == indices(whole)
    assert resumed.rollouts() == whole.rollouts()
    assert resumed.weights == whole.weights


def test_nothing_of_a_run_is_left(place, whole):
    left = [p.info["cmdline"] for p in psutil.process_iter(["cmdline"]) if str(place.folder) in str(p.info["cmdline"])]
    assert left == []


def test_vllm_and_deepspeed_work_without_ray(place):
    embedded = {"launcher": None, "placement": None, "trainer": {"use": "deepspeed", "stage": 2, "lr": 1e-3}}
    config = place.config("grpo", "embedded", **{**CLUSTER, **embedded, "run": {"steps": 2}})
    finished = Training(place, config).finish()
    assert finished.code == 0, finished.said
    assert all(line["sync/canary"] < 1e-5 for line in finished.lines())
