"""Tests for each launcher: calls and streams of a role's ranks, with real processes."""

from __future__ import annotations

import gc
import socket
import time
from contextlib import suppress

import pytest
import torch
from rlhf.errors import CapabilityError, CheckpointError, RlhfError, TrainingError, WorkerError
from rlhf.interfaces import ModelSpec, Place
from rlhf.paths import disk_is_full
from rlhf.types import RoleSpec
from rlhf_workers.driver import failures, rank_group
from rlhf_workers.process.failure import RemoteTraceback
from rlhf_workers.process.payload import Stored
from worker_standins import OddTrainer


def spec(role: str = "policy", ranks: int = 1) -> ModelSpec:
    return ModelSpec(RoleSpec(role, trained=True), "", world_size=ranks)


@pytest.fixture(scope="module")
def steady(make_launcher):
    """Two ranks for tests after which they can be called again."""
    launcher = make_launcher()
    launcher.place({"policy": Place(2)})
    yield launcher.launch_trainer(OddTrainer, None, spec(ranks=2))
    launcher.shutdown()


@pytest.fixture
def pair(launch):
    """Two ranks for one test, after which they cannot be called again."""
    launcher = launch()
    launcher.place({"policy": Place(2)})
    return launcher.launch_trainer(OddTrainer, None, spec(ranks=2))


@pytest.fixture
def brief_grace(monkeypatch):
    """Other ranks that certainly hang are not waited for as long as in a run."""
    for module in (failures, rank_group):
        monkeypatch.setattr(module, "GRACE_SECONDS", 0.3)


def test_tensors_in_arguments_and_results_are_writable(steady):
    tensors = [torch.ones(50_000), torch.full((50_000,), 3.0)]
    results = steady.call("double", [(t,) for t in tensors])
    assert [float(t[0]) for t in results] == [2.0, 6.0]
    results[0] += 1
    assert float(tensors[0][0]) == 1.0


def test_the_memory_is_that_of_the_ranks(steady):
    base, other = steady.peak_memory()
    steady.call("double", [(torch.ones(50_000_000),), (torch.ones(1),)])  # 200 MB
    grown, stable = steady.peak_memory()
    assert grown["process"] - base["process"] > 100e6
    assert stable["process"] - other["process"] < 100e6


def test_begin_does_not_wait(steady):
    results = steady.begin("sleeps", [(1.0,), (1.0,)])
    while not (doing := steady.calls.get(steady.members[0].side_call("stacks"))[""]).startswith("in "):
        time.sleep(0.01)
    assert doing.startswith("in sleeps() for")
    assert steady.call("world_size", [()] * 2) == [2, 2], "this call runs after the first"
    assert results() == ["slept", "slept"]


def test_errors_of_begin_are_raised_with_its_results(steady):
    results = steady.begin("raises", [("plain",)] * 2)
    assert steady.call("world_size", [()] * 2) == [2, 2]
    with pytest.raises(TrainingError, match=r"policy rank \d .*raises\(\) raised ValueError: a plain error"):
        results()


def test_wrong_numbers_of_arguments_are_refused(steady):
    for wrong in (1, 3):
        with pytest.raises(
            CapabilityError, match=f"policy has 2 ranks; world_size.. was called with arguments for {wrong}"
        ):
            steady.call("world_size", [()] * wrong)


def test_errors_of_this_project_keep_their_class(steady):
    with pytest.raises(
        CheckpointError, match=r"policy rank \d \(node 127.0.0.1, pid \d+\): a damaged checkpoint"
    ) as info:
        steady.call("raises", [("checkpoint",)] * 2)
    assert isinstance(info.value.__cause__, RemoteTraceback)
    with pytest.raises(RlhfError, match="an error of a plugin's own") as info:
        steady.call("raises", [("own",)] * 2)
    assert type(info.value) is RlhfError


def test_other_errors_name_their_worker(steady):
    with pytest.raises(TrainingError, match=r"policy rank \d .*raises\(\) raised ValueError: a plain error") as info:
        steady.call("raises", [("plain",)] * 2)
    assert 'raise ValueError("a plain error")' in str(info.value.__cause__)
    with pytest.raises(TrainingError) as info:
        steady.call("raises", [("disk",)] * 2)
    assert disk_is_full(info.value)
    assert steady.call("world_size", [()] * 2) == [2, 2], "every rank ended, so the group can be called again"


def test_the_first_failure_is_raised_without_waiting_for_hanging_ranks(pair, brief_grace):
    start = time.monotonic()
    with pytest.raises(TrainingError, match=r"policy rank 1 .*raises_on\(\) raised ValueError: first cause on 1"):
        pair.call("raises_on", [(1, 60.0)] * 2)
    assert time.monotonic() - start < 50
    with pytest.raises(WorkerError, match=r"world_size\(\) can no longer be called: policy rank 0 did not return"):
        pair.call("world_size", [()] * 2)


@pytest.mark.parametrize("seconds", [0.0, 60.0], ids=["the other rank fails first", "the other rank waits"])
def test_a_killed_rank_is_the_first_cause(pair, seconds):
    start = time.monotonic()
    with pytest.raises(WorkerError) as info:
        pair.call("dies", [(1, seconds)] * 2)
    assert time.monotonic() - start < 50
    message = str(info.value)
    pid = pair.members[1].facts["pid"]
    assert f"policy rank 1 (node 127.0.0.1, pid {pid}) died during dies()" in message
    assert "its process was killed" in message
    assert message.endswith("\n  last words")
    with pytest.raises(WorkerError, match=r"can no longer be called: .*policy rank 1 .* died during"):
        pair.call("world_size", [()] * 2)


def test_a_stream_yields_references_for_other_groups(launch):
    launcher = launch()
    launcher.place({"policy": Place(2), "critic": Place(share="policy")})
    policy = launcher.launch_trainer(OddTrainer, None, spec(ranks=2))
    critic = launcher.launch_trainer(OddTrainer, None, spec("critic"))
    items = list(policy.stream("arrays", 4, 100_000, timeout=30.0))
    assert all(isinstance(item, Stored) for item in items)
    assert critic.call("first_of", [(items,)]) == [[0, 1, 2, 3]]
    assert policy.call("how_many", [()] * 2) == [4, 4], "every rank ran the whole method"


def test_a_stream_is_at_most_two_items_ahead_of_its_reader(steady):
    base = steady.calls.get(steady.members[0].side_call("pulse"))
    stream = steady.stream("arrays", 6, 1_000_000)
    next(stream)

    def count_items() -> int:
        return steady.calls.get(steady.members[0].side_call("pulse")) - base

    end = time.monotonic() + 60
    while count_items() < 1 + 2 and time.monotonic() < end:
        time.sleep(0.1)
    time.sleep(1.0)
    assert count_items() == 1 + 2, "begin, and two items"
    assert len(list(stream)) == 5


def test_a_stream_that_is_not_read_to_its_end_is_finished_before_the_next_call(steady):
    stream = steady.stream("arrays", 6, 1_000_000)
    next(stream)
    assert steady.call("how_many", [()] * 2) == [6, 6], "the ranks finished the stream before the next call"
    del stream
    gc.collect()
    assert steady.call("world_size", [()] * 2) == [2, 2]


def test_a_stream_that_exceeds_its_timeout_is_an_error(pair):
    with pytest.raises(TrainingError, match=r"policy: arrays\(\) returned nothing within 1 s \(policy rank 0"):
        list(pair.stream("arrays", 3, 10, 30.0, timeout=1.0))


@pytest.mark.parametrize("rank", [0, 1])
def test_an_error_in_a_stream_names_its_rank(pair, brief_grace, rank):
    start, items = time.monotonic(), []
    with pytest.raises(TrainingError, match=rf"policy rank {rank} .*breaks_off\(\) raised ValueError: no more after 2"):
        items.extend(pair.stream("breaks_off", rank, 2))
    assert time.monotonic() - start < 50
    if rank == 0:
        assert len(list(pair.stream("arrays", 2, 10))) == 2
    else:  # rank 0 waits for the failed rank for minutes
        with pytest.raises(WorkerError, match=r"can no longer be called: policy rank 0 did not return from break"):
            pair.call("world_size", [()] * 2)


def test_an_error_of_a_rank_in_an_abandoned_stream_is_raised_by_the_next_call(pair, brief_grace, tmp_path):
    marker = tmp_path / "marker"
    stream = pair.stream("breaks_off", 1, 2, str(marker))
    next(stream)
    stream.close()
    marker.touch()
    with pytest.raises(TrainingError, match=r"policy rank 1 .*breaks_off\(\) raised ValueError: no more after 2"):
        pair.call("world_size", [()] * 2)


@pytest.mark.full
def test_a_rank_that_is_killed_while_it_streams_is_an_error(pair):
    stream = pair.stream("arrays", 50, 1000, 0.2)
    next(stream)
    with suppress(ProcessLookupError):
        __import__("os").kill(pair.members[0].facts["pid"], 9)
    with pytest.raises(WorkerError, match=r"policy rank 0 .* died during arrays\(\)"):
        list(stream)


def test_ranks_can_run_a_collective_in_a_call_after_the_start(steady):
    first, second = (w["spec"] for w in steady.call("where", [()] * 2))
    host, port = first.rendezvous.removeprefix("tcp://").split(":")
    with socket.socket() as stranger, pytest.raises(OSError, match="in use"):  # the port is theirs until they end
        stranger.bind((host, int(port)))
    assert steady.call("adds", [()] * 2) == [3.0, 3.0]
    assert first.rendezvous == second.rendezvous
    assert first.rendezvous.startswith("tcp://127.0.0.1:")
    assert (first.rank, second.rank, first.world_size) == (0, 1, 2)
