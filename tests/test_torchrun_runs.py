"""Whole runs on two machines of torchrun, with vLLM and DeepSpeed. Both machines are this one, if possible as two hosts
between which there is a network (:mod:`rlhf_testing.two_hosts`)."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from rlhf_runtime.output.metrics import read_metrics
from rlhf_testing.tiny import tiny_model
from rlhf_testing.two_hosts import ADDRESSES, NotPermitted, TwoHosts

from tests.forks import Forks
from tests.runs import Finished, Workshop, merged
from tests.test_cluster_runs import CLUSTER, Training

pytestmark = [pytest.mark.slow, pytest.mark.cluster, pytest.mark.full]

TORCHRUN = {**CLUSTER, "launcher": {"use": "torchrun", "cpus": 1}}
"""One core of each machine: a rank and a part of the engines are on each."""


class Machines:
    """``torchrun rlhf train`` on two machines."""

    def __init__(self, shop: Workshop, config: dict[str, Any], *flags: str, hosts: TwoHosts | None = None) -> None:
        """``hosts``: None starts both on this host."""
        self.output = Path(config["run"]["output"])
        address = "127.0.0.1" if hosts is None else ADDRESSES[0]
        folder = Path(sys.executable).parent
        command = [str(folder / "torchrun"), "--nnodes=2", f"--master-port={_free_port()}", f"--master-addr={address}"]
        rlhf = ["--no-python", str(folder / "rlhf"), *shop.arguments(config, *flags)]
        self.logs = [shop.folder / f"{self.output.name} {n} {len(flags)}.log" for n in range(2)]
        self.torchruns = []
        for n, log in enumerate(self.logs):
            started = [*command, f"--node-rank={n}", *rlhf]
            self.torchruns.append(
                subprocess.Popen(
                    started if hosts is None else hosts.command(n, *started),
                    stdout=log.open("wb"),
                    stderr=subprocess.STDOUT,
                    env={**os.environ, "OMP_NUM_THREADS": "1"},
                )
            )

    def said(self) -> str:
        return "\n".join(log.read_text()[-6000:] for log in self.logs)

    def wait_for_step(self, step: int) -> list[psutil.Process]:
        """All processes of the run, after the step."""
        deadline, path = time.monotonic() + 300, self.output / "metrics.jsonl"
        while not path.exists() or len(read_metrics(path)) < step:
            assert time.monotonic() < deadline, self.said()
            assert self.torchruns[0].poll() is None, self.said()
            time.sleep(0.1)
        return [p for t in self.torchruns for p in psutil.Process(t.pid).children(recursive=True)]

    def finish(self) -> list[int]:
        return [torchrun.wait(300) for torchrun in self.torchruns]


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
        return port


@pytest.fixture
def hosts() -> Iterator[TwoHosts | None]:
    try:
        with TwoHosts() as hosts:
            yield hosts
    except NotPermitted:
        yield None


@pytest.fixture
def place(tiny: Workshop, tmp_path: Path) -> Workshop:
    model = tiny_model(tmp_path / "tiny", hidden=32, heads=2, kv_heads=1, head_dim=32)
    return Workshop(tmp_path, model, tiny.data)


def test_a_run_on_two_machines_is_the_run_on_one_also_after_a_stop(
    forks: Forks, place: Workshop, hosts: TwoHosts | None
) -> None:
    on_one = place.config("grpo", "one", **merged(TORCHRUN, {"launcher": {"use": "processes", "cpus": 2}}))
    whole = Training(forks, place, on_one).finish()
    assert whole.code == 0, whole.said
    config = place.config("grpo", "two", **merged(TORCHRUN, {"checkpoint": {"every": 100}}))
    run = Machines(place, config, hosts=hosts)
    started = run.wait_for_step(2)
    assert {path.name for path in Path(run.output, "workers").iterdir()} >= {"policy-0.log", "policy-1.log"}
    run.torchruns[0].send_signal(signal.SIGTERM)  # torchrun passes it on
    assert run.finish()[0] != 0
    assert psutil.wait_procs(started, timeout=30)[1] == []
    assert (run.output / "checkpoints").exists(), run.said()
    again = Machines(place, config, "--resume", hosts=hosts)
    assert again.finish() == [0, 0], again.said()
    finished = Finished(again.output, 0)
    assert finished.rollouts() == whole.rollouts()
    assert finished.weights == whole.weights
    assert all(line["sync/canary"] < 1e-5 for line in finished.lines())


def test_a_machine_behind_a_broken_network_is_named(place: Workshop, hosts: TwoHosts | None) -> None:
    if hosts is None:
        pytest.skip("needs root, to make network namespaces")
    run = Machines(place, place.config("grpo", "cut", **merged(TORCHRUN, {"run": {"steps": 1000}})), hosts=hosts)
    started = run.wait_for_step(1)
    hosts.cut()
    assert run.finish() == [1, 1], run.said()
    assert "was lost: its process of torchrun ended, or the network broke" in run.logs[0].read_text(), run.said()
    assert psutil.wait_procs(started, timeout=30)[1] == []


def test_what_the_driver_refuses_before_it_places_ends_all(place: Workshop) -> None:
    run = Machines(place, place.config("grpo", "refused", **merged(TORCHRUN, {"data": {"train": "absent.jsonl"}})))
    assert run.finish() == [1, 1], run.said()
    driver, other = (log.read_text() for log in run.logs)
    assert "absent.jsonl" in driver
    assert "torchrun on the machine of the driver (127.0.0.1) ended before the run started its workers" in other
    assert "Traceback" not in other.partition("torch/distributed/elastic")[0], other


def test_a_placement_that_does_not_fit_ends_all(place: Workshop) -> None:
    run = Machines(place, place.config("grpo", "refused", **merged(TORCHRUN, {"placement": {"policy": {"ranks": 3}}})))
    assert run.finish() == [1, 0], run.said()  # the other machine was told that the run has ended
    assert "the placement does not fit on the machines of torchrun" in run.logs[0].read_text()
