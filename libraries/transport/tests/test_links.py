"""Buckets over real links between threads and processes of this machine, and links of which one end is gone."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest
import torch
from rlhf.errors import SyncError
from rlhf.weights.bucket import buckets
from rlhf_transport.coordination import serve
from rlhf_transport.ends import inlet, outlet
from rlhf_transport.link import Link

CPU = torch.device("cpu")
KINDS = ["shared", "broadcast"]
RECEIVER = """
import json, sys, torch
from rlhf_transport.ends import inlet
from rlhf_transport.layout import Layout
from rlhf_transport.link import Link, Shipment
link = Link(*json.loads(sys.argv[1]))
end = inlet(link, int(sys.argv[2]), torch.device("cpu"))
print("connected", flush=True)
for line in sys.stdin:
    number, tensors, marks, nbytes, lost = json.loads(line)
    layout = Layout(tuple((n, d, tuple(s), a, b) for n, d, s, a, b in tensors), tuple(marks), nbytes)
    with end.open(Shipment(number, layout, lost)) as bucket:
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
    """``connect(kind, receivers)`` -> (meeting, outlet, inlets)."""
    with ExitStack() as stack:

        def make(kind, receivers, timeout=20.0):
            meeting, address = serve("127.0.0.1", timeout)
            link = Link(kind, address, receivers, 1, False, timeout)
            with ThreadPoolExecutor(receivers + 1) as pool:
                source = pool.submit(outlet, link, 0)
                sinks = [pool.submit(inlet, link, n, CPU) for n in range(receivers)]
                ends = source.result(), [s.result() for s in sinks]
            for end in (ends[0], *ends[1]):
                stack.callback(end.close)
            return meeting, *ends

        yield make


def take(end, shipment):
    with end.open(shipment) as bucket:
        return {n: t.clone() for n, t in bucket.tensors}, bucket.received()


def cross(source, sinks, seed, limit=2000):
    """What each receiver got of one sync, as the controller runs it: one shipment after another."""
    sent: dict[str, str] = {}
    got = [{} for _ in sinks]
    with ThreadPoolExecutor(len(sinks) + 1) as pool:
        shipments = source.carry(buckets(weights(seed), limit, sent))
        ahead = pool.submit(next, shipments, None)
        while (shipment := ahead.result()) is not None:
            taken = [pool.submit(take, end, shipment) for end in sinks]
            ahead = pool.submit(next, shipments, None)
            for into, one in zip(got, taken, strict=True):
                tensors, marks = one.result()
                assert marks == {name: sent[name] for name in tensors}
                into.update(tensors)
    return got, sent


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("receivers", [1, 3])
def test_what_is_sent_arrives(connect, kind, receivers):
    _, source, sinks = connect(kind, receivers)
    for seed in range(3):  # the memory is used again
        got, sent = cross(source, sinks, seed)
        assert len(sent) == 6
        for each in got:
            assert list(each) == list(sent)
            for name, tensor in weights(seed):
                assert each[name].dtype == tensor.dtype
                assert torch.equal(each[name], tensor)


@pytest.mark.parametrize("kind", KINDS)
def test_it_arrives_in_another_process(kind):
    meeting, address = serve("127.0.0.1", 60.0)
    link = Link(kind, address, 2, 1, False, 60.0)
    fields = json.dumps([link.kind, address, 2, 1, False, 60.0])
    children = [
        subprocess.Popen(
            [sys.executable, "-c", RECEIVER, fields, str(n)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for n in range(2)
    ]
    sent: dict[str, str] = {}
    got = [{}, {}]
    try:
        source = outlet(link, 0)
        assert [c.stdout.readline() for c in children] == ["connected\n"] * 2
        with ThreadPoolExecutor(1) as pool:
            shipments = source.carry(buckets(weights(1), 2000, sent))
            ahead = pool.submit(next, shipments, None)
            while (s := ahead.result()) is not None:
                line = json.dumps([s.number, s.layout.tensors, s.layout.fingerprints, s.layout.nbytes, s.lost])
                for child in children:
                    child.stdin.write(line + "\n")
                    child.stdin.flush()
                ahead = pool.submit(next, shipments, None)
                for into, child in zip(got, children, strict=True):
                    into.update(json.loads(child.stdout.readline()))
        assert got == [sent, sent]
        assert len(sent) == 6
    finally:
        meeting.give_up()
        for child in children:
            child.kill()
            child.communicate()


@pytest.mark.parametrize("kind", KINDS)
def test_a_receiver_that_does_not_come_is_given_up(connect, kind):
    """The trainer goes on; its shipments say that they are lost, and so do the receivers."""
    meeting, source, sinks = connect(kind, 2)
    shipments = source.carry(buckets(weights(0), 1000, {}))
    with ThreadPoolExecutor(2) as pool:
        first = next(shipments)
        if kind == "broadcast":  # the receiver that is there waits inside
            waits = pool.submit(take, sinks[0], first)
            rest = pool.submit(list, shipments)
            meeting.give_up()
            with pytest.raises(SyncError, match="given up"):
                waits.result()
        else:
            take(sinks[0], first)
            rest = pool.submit(list, shipments)
            meeting.give_up()
        late = rest.result()
    assert "given up" in late[-1].lost
    with pytest.raises(SyncError, match="does not come: the weight sync was given up while waiting for the engines"):
        take(sinks[0], late[-1])


@pytest.mark.parametrize("kind", KINDS)
def test_a_wait_has_an_end(connect, kind):
    _, source, sinks = connect(kind, 2, timeout=1.0)
    late = list(source.carry(buckets(weights(0), 1000, {})))
    assert "waiting for the engines to take a bucket took longer than 1 s (sync.timeout)" in late[-1].lost
    with pytest.raises(SyncError, match="does not come"):
        take(sinks[0], late[-1])


def test_an_end_that_waits_for_others_to_connect_is_told_to_stop():
    """Two receivers and the trainer should meet; one receiver never comes."""
    meeting, address = serve("127.0.0.1", 30.0)
    link = Link("broadcast", address, 2, 1, False, 30.0)
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(outlet, link, 0), pool.submit(inlet, link, 0, CPU)]
        time.sleep(0.5)
        assert not any(w.done() for w in waiting)
        meeting.give_up()
        for end in waiting:
            with pytest.raises(SyncError, match="the weight sync was given up while the ends of the link met"):
                end.result()


def test_the_store_is_on_one_address_only():
    import psutil

    _, address = serve("127.0.0.1", 5.0)
    port = int(address.rpartition(":")[2])
    listening = {
        c.laddr.ip for c in psutil.Process().net_connections() if c.status == "LISTEN" and c.laddr.port == port
    }
    assert listening == {"127.0.0.1"}
