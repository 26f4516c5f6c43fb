"""Real links between threads and processes of this machine, and links with an end that never answers."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import timedelta
from typing import ClassVar

import pytest
import torch
from rlhf.errors import SyncError
from rlhf.interfaces import ModelSpec
from rlhf.types import RoleSpec
from rlhf.weights.bucket import buckets
from rlhf_testing.launcher import CountingTrainer
from rlhf_workers.links.coordination import serve
from rlhf_workers.links.ends import ConnectedTrainer, connect_receiver, connect_sender
from rlhf_workers.links.link import Link

CPU = torch.device("cpu")
KINDS = [pytest.param("shared", marks=pytest.mark.linux("memfd_create")), "broadcast"]
RECEIVER = """
import json, sys, torch
from rlhf_workers.links.ends import connect_receiver
from rlhf_workers.links.link import BucketLayout
from rlhf_workers.links.link import BucketHeader, Link
link = Link(*json.loads(sys.argv[1]))
receiver = connect_receiver(link, int(sys.argv[2]), torch.device("cpu"))
print("connected", flush=True)
for line in sys.stdin:
    number, tensors, marks, nbytes, error = json.loads(line)
    layout = BucketLayout(tuple((n, d, tuple(s), a, b) for n, d, s, a, b in tensors), tuple(marks), nbytes)
    with receiver.open(BucketHeader(number, layout, error)) as bucket:
        print(json.dumps(bucket.received()), flush=True)
"""


def weights(seed: int):
    draw = torch.Generator().manual_seed(seed)
    yield "matrix", torch.randn(7, 33, generator=draw)
    yield "half", torch.randn(13, generator=draw).bfloat16()
    yield "turned", torch.randn(5, 6, generator=draw).t()
    yield "scalar", torch.randn((), generator=draw)
    yield "nothing", torch.empty(0)
    yield "large", torch.randn(5000, generator=draw)


@pytest.fixture
def connect():
    """``connect(kind, receivers)`` -> (coordination, sender, receivers)."""
    with ExitStack() as stack:

        def make(kind, receivers, timeout=20.0):
            coordination, address = serve("127.0.0.1", timeout)
            link = Link(kind, address, receivers, 1, False, timeout)
            with ThreadPoolExecutor(receivers + 1) as pool:
                source = pool.submit(connect_sender, link, 0)
                sinks = [pool.submit(connect_receiver, link, n, CPU) for n in range(receivers)]
                ends = source.result(), [s.result() for s in sinks]
            for end in (ends[0], *ends[1]):
                stack.callback(end.close)
            return coordination, *ends

        yield make


def take(end, header):
    with end.open(header) as bucket:
        return {n: t.clone() for n, t in bucket.tensors}, bucket.received()


def cross(source, sinks, seed, limit=2000):
    """The tensors that each receiver got in one sync. As in a run, each header is sent after the previous one."""
    fingerprints: dict[str, str] = {}
    results = [{} for _ in sinks]
    with ThreadPoolExecutor(len(sinks) + 1) as pool:
        headers = source.send(buckets(weights(seed), limit, fingerprints))
        next_header = pool.submit(next, headers, None)
        while (header := next_header.result()) is not None:
            futures = [pool.submit(take, end, header) for end in sinks]
            next_header = pool.submit(next, headers, None)
            for into, future in zip(results, futures, strict=True):
                tensors, marks = future.result()
                assert marks == {name: fingerprints[name] for name in tensors}
                into.update(tensors)
    return results, fingerprints


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("receivers", [1, 3])
def test_receivers_get_the_tensors_that_were_sent(connect, kind, receivers):
    _, source, sinks = connect(kind, receivers)
    for seed in range(3):  # the buffers are used again
        results, fingerprints = cross(source, sinks, seed)
        assert len(fingerprints) == 6
        for tensors in results:
            assert list(tensors) == list(fingerprints)
            for name, tensor in weights(seed):
                assert tensors[name].dtype == tensor.dtype
                assert torch.equal(tensors[name], tensor)


@pytest.mark.slow
@pytest.mark.linux("memfd_create")
def test_receivers_in_other_processes_map_the_memory_of_the_sender():
    coordination, address = serve("127.0.0.1", 60.0)
    link = Link("shared", address, 2, 1, False, 60.0)
    fields = json.dumps([link.kind, address, 2, 1, False, 60.0])
    children = [
        subprocess.Popen(
            [sys.executable, "-c", RECEIVER, fields, str(n)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for n in range(2)
    ]
    fingerprints: dict[str, str] = {}
    results = [{}, {}]
    try:
        source = connect_sender(link, 0)
        assert [c.stdout.readline() for c in children] == ["connected\n"] * 2
        with ThreadPoolExecutor(1) as pool:
            headers = source.send(buckets(weights(1), 2000, fingerprints))
            next_header = pool.submit(next, headers, None)
            while (s := next_header.result()) is not None:
                line = json.dumps([s.number, s.layout.tensors, s.layout.fingerprints, s.layout.nbytes, s.error])
                for child in children:
                    child.stdin.write(line + "\n")
                    child.stdin.flush()
                next_header = pool.submit(next, headers, None)
                for into, child in zip(results, children, strict=True):
                    into.update(json.loads(child.stdout.readline()))
        assert results == [fingerprints, fingerprints]
        assert len(fingerprints) == 6
    finally:
        coordination.abort()
        for child in children:
            child.kill()
            child.communicate()


@pytest.mark.parametrize("kind", KINDS)
def test_an_aborted_sync_is_an_error_of_the_receivers_not_of_the_sender(connect, kind):
    """One of two receivers never takes a bucket. The sender's later headers carry the error."""
    coordination, source, sinks = connect(kind, 2)
    headers = source.send(buckets(weights(0), 1000, {}))
    with ThreadPoolExecutor(2) as pool:
        first = next(headers)
        if kind == "broadcast":  # the first receiver waits inside the collective
            waits = pool.submit(take, sinks[0], first)
            rest = pool.submit(list, headers)
            coordination.abort()
            with pytest.raises(SyncError, match="aborted"):
                waits.result()
        else:
            take(sinks[0], first)
            rest = pool.submit(list, headers)
            coordination.abort()
        late = rest.result()
    assert "aborted" in late[-1].error
    with pytest.raises(SyncError, match="will not arrive: the weight sync was aborted while waiting for the engines"):
        take(sinks[0], late[-1])


@pytest.mark.parametrize("kind", KINDS)
def test_waiting_for_receivers_times_out(connect, kind):
    _, source, sinks = connect(kind, 2, timeout=1.0)
    late = list(source.send(buckets(weights(0), 1000, {})))
    assert "waiting for the engines to take a bucket took longer than 1 s (sync.timeout)" in late[-1].error
    with pytest.raises(SyncError, match="will not arrive"):
        take(sinks[0], late[-1])


class TwoRanks(CountingTrainer):
    """Records the ranks that are asked for whole tensors."""

    def weights(self, view="live", every_rank=False):
        self.asked = view, every_rank
        if self.spec.rank == 0 or every_rank:
            yield from weights(1)


@pytest.mark.parametrize("kind", KINDS)
def test_a_connected_trainer_sends_its_buckets(kind):
    """Rank 0 sends what receivers take; rank 1 takes part and sends nothing. On CPUs no link asks for every rank."""
    _, address = serve("127.0.0.1", 20.0)
    link = Link(kind, address, 1, 2, False, 20.0)
    role = RoleSpec("policy", trained=True)
    trainers = [TwoRanks(None, ModelSpec(role, "", rank=rank, world_size=2)) for rank in range(2)]
    with ThreadPoolExecutor(3) as pool:
        connecting = [pool.submit(ConnectedTrainer, trainer, link) for trainer in trainers]
        receiver = pool.submit(connect_receiver, link, 0, CPU).result()
        ranks = [future.result() for future in connecting]
        headers, received = ranks[0].send_buckets("base", 2000), {}
        next_header = pool.submit(next, headers, None)
        while (header := next_header.result()) is not None:
            next_header = pool.submit(next, headers, None)
            received |= take(receiver, header)[1]
    assert received == trainers[0].sent_fingerprints()
    assert len(received) == 6
    assert list(ranks[1].send_buckets("base", 2000)) == []
    assert [trainer.asked for trainer in trainers] == [("base", False)] * 2
    for end in (*ranks, receiver):
        end.close()


@pytest.mark.parametrize("kind", KINDS)
def test_on_gpus_every_rank_gets_whole_tensors(kind):
    assert Link(kind, "", 1, 2, True, 1.0).every_rank is True
    assert Link(kind, "", 1, 2, False, 1.0).every_rank is False


@pytest.fixture
def three_ends():
    """(the driver's coordination, rank 0, rank 1, a receiver) of a broadcast."""
    coordination, address = serve("127.0.0.1", 20.0)
    link = Link("broadcast", address, 1, 2, False, 20.0)
    with ThreadPoolExecutor(2) as pool:
        source, sink = pool.submit(connect_sender, link, 0), pool.submit(connect_receiver, link, 0, CPU)
        ends = source.result(), connect_sender(link, 1), sink.result()
    yield coordination, *ends
    for end in ends:
        end.close()


def test_other_ranks_gather_a_bucket_after_rank_0_has_sent_the_one_before(three_ends):
    """As on GPUs, where they get the buckets too."""
    coordination, source, idle, sink = three_ends
    sent_before: list[int] = []

    def gathered():
        for bucket in buckets(weights(0), 1000, {}):
            sent_before.append(coordination.store.add("sent", 0))
            yield bucket

    with ThreadPoolExecutor(2) as pool:
        for sync in range(2):
            follows = pool.submit(idle.send, gathered())
            headers = source.send(buckets(weights(0), 1000, {}))
            next_header = pool.submit(next, headers, None)
            while (header := next_header.result()) is not None:
                next_header = pool.submit(next, headers, None)
                take(sink, header)
            assert list(follows.result()) == []
            assert all(count >= number for number, count in enumerate(sent_before)), sent_before
            assert len(sent_before) == 3 * (sync + 1)


def test_other_ranks_gather_the_rest_of_a_sync_that_failed(three_ends):
    """Rank 0 needs them to gather, and has the error."""
    coordination, source, idle, _ = three_ends
    headers = source.send(buckets(weights(0), 1000, {}))
    next(headers)  # no receiver takes it
    with ThreadPoolExecutor(1) as pool:
        follows = pool.submit(idle.send, buckets(weights(0), 1000, {}))
        coordination.abort()
        assert list(follows.result()) == []
    assert "aborted" in list(headers)[-1].error


class StandInForNccl:
    """A process group of NCCL whose connection to the other ends never comes about."""

    class Options:
        _timeout: timedelta

    made: ClassVar[list[StandInForNccl]] = []
    never = threading.Event()

    def __init__(self, store, rank, size, options):
        self.rank, self.size, self.options = rank, size, options
        self.made.append(self)

    def eager_connect_single_device(self, device):
        self.device = device
        self.never.wait(30)


def test_connecting_a_stand_in_for_nccl_can_be_aborted_and_polls_end_before_its_timeout(monkeypatch):
    monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", StandInForNccl, raising=False)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    coordination, address = serve("127.0.0.1", 20.0)
    link, device = Link("broadcast", address, 1, 1, True, 20.0), torch.device("cuda", 0)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(connect_receiver, link, 0, device)
        while not any(hasattr(group, "device") for group in StandInForNccl.made):
            assert not waiting.done(), "it connects before it is used"
        coordination.abort()
        with pytest.raises(SyncError, match="the weight sync was aborted while connecting the ends of the link"):
            waiting.result()
    StandInForNccl.never.set()
    [group] = StandInForNccl.made
    assert (group.rank, group.size, group.device) == (1, 2, device)
    assert group.options._timeout.total_seconds() > link.timeout, "NCCL would end the process"


def test_connecting_can_be_aborted():
    """The sender and one receiver wait for the second receiver, which never connects."""
    coordination, address = serve("127.0.0.1", 30.0)
    link = Link("broadcast", address, 2, 1, False, 30.0)
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(connect_sender, link, 0), pool.submit(connect_receiver, link, 0, CPU)]
        time.sleep(0.5)
        assert not any(w.done() for w in waiting)
        coordination.abort()
        for end in waiting:
            with pytest.raises(SyncError, match="the weight sync was aborted while connecting the ends of the link"):
                end.result()
    # The threads that connect end when the store does, and torch prints a stack trace of each: within this test.
    del coordination
    for thread in threading.enumerate():
        if thread.name == "rlhf-sync-connect":
            thread.join(20)


def test_the_store_listens_on_one_address_only():
    import psutil

    _, address = serve("127.0.0.1", 5.0)
    port = int(address.rpartition(":")[2])
    listening = {
        c.laddr.ip for c in psutil.Process().net_connections() if c.status == "LISTEN" and c.laddr.port == port
    }
    assert listening == {"127.0.0.1"}
