"""Tests for each launcher: every transport of weights to two engines.

One run serves all tests and survives killed engines.
"""

from __future__ import annotations

import os
import signal
from dataclasses import replace

import pytest
from rlhf.errors import RolloutError, SyncError
from rlhf.types import GenerationRequest, Sampling
from worker_run import Run, expected, requests

pytestmark = pytest.mark.slow

SHARED = pytest.param("shared", marks=pytest.mark.full)
"""For ``make test-all``; ``test_links.py`` shows in every run what this transport sends, and its ends."""
ONE_WAY = pytest.mark.parametrize("linked", ["auto"], indirect=True)
LINKS = pytest.mark.parametrize("linked", [SHARED, "broadcast"], indirect=True)


def when(*moments: str) -> pytest.MarkDecorator:
    """The moments at which an engine dies; those after the first are for ``make test-all``."""
    first, *rest = moments
    return pytest.mark.parametrize("when", [first, *(pytest.param(name, marks=pytest.mark.full) for name in rest)])


@pytest.fixture(scope="module", params=["auto", SHARED, "broadcast"])  # on CPUs "auto" is the store
def linked(request, make_launcher, tmp_path_factory):
    """A run that works again after every test."""
    launcher = make_launcher(max_restarts=20)
    yield Run(launcher, tmp_path_factory.mktemp(request.param), transport=request.param)
    launcher.shutdown()


@pytest.fixture
def r(linked):
    """The run after a successful sync."""
    linked.sync(linked.version + 1)
    return linked


def check_answers(r: Run) -> None:
    queries = requests(4)
    assert r.answers(queries) == expected(r.weights, queries)


def check_proofs(r: Run) -> None:
    assert [(p.receiver, p.version) for p in r.proofs] == [("engine 0", r.version), ("engine 1", r.version)]


def test_requests_go_to_all_engines_and_weights_too(linked):
    """This test is the first, because it starts without weights."""
    r, queries = linked, requests(6)
    assert r.answers(queries) == expected("initial", queries)
    calls = r.notes("generate")
    assert {int(pid) for _, pid, _ in calls} == set(r.pids())
    assert sorted(len(seeds.split(",")) for *_, seeds in calls) == [12, 12]
    r.sync(3)
    assert r.engines.version == 3
    check_proofs(r)
    assert all(p.received == r.policy.call("sent_fingerprints", [()])[0] for p in r.proofs)
    assert r.answers(queries) == expected(r.weights, queries)
    assert [[round(x[0]) for x in e] for e in r.engines.logprobs([(1, 2), (3, 4)])] == [[pid, pid] for pid in r.pids()]
    assert [r.engines.stale(bucket) for bucket in r.policy.send_buckets("live", 24)] == [["w0", "w1"], ["w2", "w3"]]
    r.sync(4)
    links = [r.transport] * 2 * (r.transport != "auto")
    assert [kind for _, kind in r.notes("connect")] == links, "connected once"
    r.engines.sleep()
    r.engines.wake()
    assert [len(r.notes(word)) for word in ("sleep", "wake")] == [2, 2]
    assert r.engines.name == "odd"


@when("die-in-take", "die-before-take")
def test_an_engine_killed_while_it_takes_weights(r, when):
    (r.folder / when).touch()
    old_pids, pushes = r.pids(), r.pushes
    r.sync(r.version + 1)
    assert r.pushes == pushes + 2
    check_proofs(r)
    assert len(set(old_pids) & set(r.pids())) == 1
    check_answers(r)


@LINKS
@when("die-after-connect", "die-before-connect")
def test_an_engine_killed_while_the_links_connect(r, when):
    """The waits of the other ends are aborted, and the links are connected again with the replacement."""
    r.engines.link.drop()
    (r.folder / when).touch()
    old_pids, pushes = r.pids(), r.pushes
    r.sync(r.version + 1)
    assert r.pushes == pushes + 1, "nothing had been sent yet"
    assert len(set(old_pids) & set(r.pids())) == 1
    check_proofs(r)
    check_answers(r)


@LINKS
def test_a_link_that_cannot_connect_fails_the_sync(r):
    r.engines.link.drop()
    (r.folder / "fail-connect").touch()
    old_pids = r.pids()
    with pytest.raises(SyncError, match=r"engine \d .*connect\(\) raised OSError: no network today"):
        r.sync(r.version + 1)
    r.sync(r.version + 1)
    check_answers(r)
    assert r.pids() == old_pids, "nobody died"


def test_an_error_in_begin_load_is_raised_at_the_first_bucket(r):
    (r.folder / "fail-begin").touch()
    with pytest.raises(SyncError, match=r"engine \d .*begin_load\(\) raised OSError: no memory today"):
        r.sync(r.version + 1)
    r.sync(r.version + 1)
    check_answers(r)


@ONE_WAY
def test_an_engine_that_raises_worker_error_in_begin_load_is_replaced(r):
    """An engine of several processes raises this error when one of them was killed."""
    (r.folder / "lost-in-load").touch()
    old_pids = r.pids()
    r.sync(r.version + 1)
    check_proofs(r)
    assert len(set(old_pids) & set(r.pids())) == 1
    check_answers(r)


def test_a_failed_sync_can_be_repeated(r):
    old_pids = r.pids()
    r.engines.begin_load(r.version + 1)
    headers = r.policy.send_buckets("live", 24, 60.0)
    r.engines.take(next(headers))
    with pytest.raises(SyncError, match=r"engine \d .*take\(\) raised AttributeError"):
        r.engines.take("no bucket")
    del headers  # the controller stops reading
    r.sync(r.version + 1)
    check_answers(r)
    assert r.pids() == old_pids, "nobody died"


@ONE_WAY
@pytest.mark.full
def test_an_engine_killed_between_two_calls(r):
    pushes = r.pushes
    os.kill(r.pids()[1], signal.SIGKILL)
    check_answers(r)
    assert r.pushes == pushes + 1


@ONE_WAY
def test_an_engine_killed_while_it_sleeps(r):
    pushes = r.pushes
    r.engines.sleep()
    os.kill(r.pids()[0], signal.SIGKILL)
    r.engines.wake()
    assert r.pushes == pushes + 1
    check_answers(r)


@ONE_WAY
def test_weights_that_an_engine_discarded_are_asked_for(r):
    pushes = r.pushes
    (r.folder / "forget-in-sleep").touch()
    r.engines.sleep()
    assert r.engines.wake() is True, "the caller must send the weights"
    assert r.pushes == pushes
    r.push()
    check_answers(r)
    r.engines.sleep()
    assert r.engines.wake() is False


@ONE_WAY
def test_an_engine_that_does_not_take_a_bucket_in_time(r, monkeypatch):
    monkeypatch.setattr(r.engines, "spec", replace(r.engines.spec, sync_timeout=1.0))
    (r.folder / "sleep-in-take").touch()
    with pytest.raises(SyncError, match=r"engine \d did not answer take\(\) within 1 s \(sync\.timeout\)"):
        r.sync(r.version + 1)
    monkeypatch.undo()
    r.sync(r.version + 1)
    check_answers(r)
    check_proofs(r)


@ONE_WAY
def test_an_engine_killed_before_the_canaries(r):
    pushes = r.pushes
    os.kill(r.pids()[0], signal.SIGKILL)
    assert [round(e[0][0]) for e in r.engines.logprobs([(1, 2)])] == r.pids()
    assert r.pushes == pushes + 1


@ONE_WAY
def test_a_request_that_fails_is_an_error_not_a_death(r):
    old_pids = r.pids()
    message = r"engine \d .*generate\(\) raised ValueError: a request that no engine survives"
    with pytest.raises(RolloutError, match=message):
        r.answers([GenerationRequest((1,), -1, Sampling(8))])
    assert r.pids() == old_pids
