"""Tests for each launcher: engines behind one generator that are killed while they work, or cannot start."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

import pytest
from rlhf.errors import CapabilityError, WorkerError
from rlhf.interfaces import GENERATOR, Generator, GeneratorSpec, Place, TakesModule
from worker_run import Run, expected, requests
from worker_standins import OddConfig, OddGenerator

pytestmark = pytest.mark.slow


@pytest.fixture
def run(launch, tmp_path):
    def make(*, engines: int = 2, seconds: float = 0.0, transport: str = "auto", **options) -> Run:
        return Run(launch(**options), tmp_path, engines, seconds, transport)

    return make


@pytest.mark.full
def test_samples_are_yielded_as_they_finish(run):
    r = run(seconds=0.3)
    start, times = time.monotonic(), []
    for _ in r.engines.generate(requests(4, 2)):
        times.append(time.monotonic() - start)
    assert len(times) == 8
    assert times[-1] - times[0] > 0.5


def test_a_killed_engine_is_replaced_and_its_samples_are_the_same(run, caplog, capfd):
    r = run(seconds=0.2)
    r.sync(1)
    r.sync(1)
    assert r.had_base
    queries = requests(6)
    old_pids = r.pids()
    assert r.answers(queries, kill=old_pids[0]) == expected(r.weights, queries)
    assert not r.had_base, "the new engine gets the base too"
    after = r.pids()
    assert after[0] != old_pids[0]
    assert after[1] == old_pids[1]
    assert r.pushes == 3, "the new engine got the current weights"
    assert f"engine 0 (node 127.0.0.1, pid {old_pids[0]}) died during generate()" in caplog.text
    assert "The engine is replaced; 2 more may be replaced within this hour" in caplog.text
    assert capfd.readouterr().out == "", "nothing repeats the message"
    draws = [seed for *_, seeds in r.notes("generate") for seed in eval(seeds)]
    assert 24 < len(draws) < 36, "only unfinished samples are sampled again"
    assert r.answers(queries) == expected(r.weights, queries)
    r.engines.close()
    deadline = time.monotonic() + 60
    while any(_lives(pid) for pid in after):
        assert time.monotonic() < deadline, "close() ends the engines"
        time.sleep(0.1)


@pytest.mark.full
def test_an_engine_killed_before_the_first_links_connect(run):
    """The engine dies when it is asked for the number of its receivers."""
    r = run(transport="broadcast", max_restarts=1)
    (r.folder / "die-receivers").touch()
    old_pids = r.pids()
    r.sync(1)
    assert r.pushes == 1, "nothing had been sent yet"
    assert len(set(old_pids) & set(r.pids())) == 1
    assert [(p.receiver, p.version) for p in r.proofs] == [("engine 0", 1), ("engine 1", 1)]
    queries = requests(4)
    assert r.answers(queries) == expected(r.weights, queries)
    r.sync(2)
    assert r.answers(queries) == expected(r.weights, queries)


@pytest.mark.full
def test_a_trainer_killed_while_the_links_connect_ends_the_run(run):
    r = run(transport="broadcast")
    os.kill(r.policy.members[0].facts["pid"], signal.SIGKILL)
    with pytest.raises(WorkerError, match=r"policy rank 0 .* died during connect_trainer\(\)"):
        r.sync(1)
    with pytest.raises(WorkerError, match=r"world_size\(\) can no longer be called: policy rank 0 .* died"):
        r.policy.call("world_size", [()])


@pytest.mark.full
def test_an_engine_whose_replacement_dies_is_replaced_again(run):
    r = run(max_restarts=2)
    r.sync(1)
    (r.folder / "die-in-start").touch()
    os.kill(r.pids()[1], signal.SIGKILL)
    queries = requests(4)
    assert r.answers(queries) == expected(r.weights, queries)
    assert len(r.notes("started")) == 4
    assert r.pushes == 2


@pytest.mark.full
def test_more_deaths_than_max_restarts_end_the_run(run):
    r = run(max_restarts=0)
    r.sync(1)
    os.kill(r.pids()[0], signal.SIGKILL)
    with pytest.raises(
        WorkerError, match=r"(?s)engine 0 \(node 127.0.0.1, pid \d+\) died .*0 engines were already replaced"
    ) as info:
        r.answers(requests(4))
    assert "launcher.max_restarts" in str(info.value)


@pytest.mark.full
def test_the_error_of_an_engine_that_cannot_start_is_raised(launch):
    launcher = launch()
    launcher.place({"policy": Place(), GENERATOR: Place(2)})
    with pytest.raises(
        WorkerError, match=r"engine \d \(node 127.0.0.1, pid \d+\): start\(\) raised ValueError: no engine today"
    ):
        launcher.launch_generator(OddGenerator, OddConfig(fail_start=True), GeneratorSpec((0,), str))


def test_generators_that_need_the_trainers_module_are_refused(launch):
    class Inside(TakesModule, Generator):
        name = "inside"

    with pytest.raises(CapabilityError, match="generator 'inside' samples from a trainer's module"):
        launch().launch_generator(Inside, None, GeneratorSpec((0,), str))
    launcher = launch()
    launcher.place({"policy": Place(), GENERATOR: Place(1)})
    with pytest.raises(CapabilityError, match="generator 'inside' samples from a trainer's module"):
        launcher.choose_link(Inside, "auto")  # before a model is loaded


def _lives(pid: int) -> bool:
    with suppress(ProcessLookupError, FileNotFoundError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False
