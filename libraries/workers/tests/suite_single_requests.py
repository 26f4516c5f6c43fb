"""Tests for each launcher: single requests to engines that sample all the time.

There are syncs, deaths and errors while requests are under way.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable

import pytest
from rlhf.errors import RolloutError, WorkerError
from rlhf.types import GenerationRequest, Sampling
from worker_run import Run, expected, requests
from worker_standins import tokens

pytestmark = pytest.mark.slow

ENDLESS = GenerationRequest((5, 1), -3, Sampling(8))
"""A request that is never answered."""


class Asking:
    """An event loop in a thread of its own, as in a run, that asks for samples."""

    def __init__(self, run: Run) -> None:
        self.run, self.loop = run, asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever)
        self.thread.start()

    def ask(self, asked):
        return [asyncio.run_coroutine_threadsafe(self.run.engines.answer(r), self.loop) for r in asked]

    def close(self) -> None:
        self.run.engines.close()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()


@pytest.fixture
def asking(launch, tmp_path):
    instances: list[Asking] = []

    def make(*, engines: int = 2, seconds: float = 0.0, in_flight: str = "continue", **options) -> Asking:
        instances.append(Asking(Run(launch(**options), tmp_path, engines, seconds, in_flight=in_flight)))
        instances[-1].run.sync(1)
        return instances[-1]

    yield make
    for instance in instances:
        instance.close()


@pytest.fixture(scope="module")
def lasting(make_launcher, tmp_path_factory):
    """Two engines, which need a second for a sample. They work again after every test."""
    launcher = make_launcher(max_restarts=20)
    asking = Asking(Run(launcher, tmp_path_factory.mktemp("lasting"), 2, 1.0))
    yield asking
    asking.close()
    launcher.shutdown()


@pytest.fixture
def a(lasting):
    """The two engines with weights of version 1. Of earlier notes those are left that tell of their starts."""
    lasting.run.sync(1)
    living = {str(pid) for pid in lasting.run.pids()}
    starts = [f"started {pid}\n" for _, pid in lasting.run.notes("started") if pid in living]
    (lasting.run.folder / "notes.txt").write_text("".join(starts))
    return lasting


def until(true: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def seeds(run: Run, word: str) -> list[int]:
    return [int(seed) for _, _, seed in run.notes(word)]


def test_each_request_is_answered_and_all_engines_work(a):
    queries = requests(3)
    assert {n: [*f.result(60).ids] for n, f in enumerate(a.ask(queries))} == expected(a.run.weights, queries)
    assert len({pid for _, pid, _ in a.run.notes("asked")}) == 2


@pytest.mark.full
def test_the_next_turn_of_a_conversation_goes_to_its_engine(asking):
    a = asking()
    first = [GenerationRequest((n, *range(40)), n, Sampling(8)) for n in range(4)]
    for future in a.ask(first):
        future.result(60)
    engines = {int(seed): pid for _, pid, seed in a.run.notes("asked")}
    assert len(set(engines.values())) == 2
    for request in reversed(first):
        a.ask([GenerationRequest((*request.ids, 4, 5), request.seed + 100, Sampling(8))])[0].result(60)
    owners = {int(seed): pid for _, pid, seed in a.run.notes("asked")}
    assert {seed: owners[seed + 100] for seed in engines} == engines


@pytest.mark.full
def test_a_request_is_answered_while_another_is_not(asking):
    a = asking(engines=2)
    assert a.run.engines.idle() is None
    [endless, other] = a.ask([ENDLESS, *requests(1, 1)])
    assert [*other.result(60).ids] == tokens(a.run.weights, requests(1, 1)[0])
    assert not endless.done()
    a.run.engines.idle()
    time.sleep(0.2)
    idle, total = a.run.engines.idle()
    assert idle == pytest.approx(total / 2, rel=0.2), "one of two engines has a request"


@pytest.mark.full
def test_a_cancelled_request_is_dropped_by_its_engine(asking):
    a = asking()
    [endless] = a.ask([ENDLESS])
    until(lambda: seeds(a.run, "asked") == [-3])
    endless.cancel()
    until(lambda: seeds(a.run, "dropped") == [-3])


def test_unfinished_requests_go_on_after_new_weights(a):
    queries = requests(1)
    futures = a.ask(queries)
    until(lambda: len(a.run.notes("asked")) == 4)
    a.run.sync(2)
    turns = [f.result(60) for f in futures]
    assert [[*t.ids] for t in turns] == list(expected(a.run.weights, queries).values())
    assert {t.versions for t in turns} == {((0, 2),)}
    assert len(a.run.notes("asked")) == 4, "no engine was asked twice"


@pytest.mark.full
def test_a_drain_waits_for_what_the_engines_began(asking):
    a = asking(seconds=0.5, in_flight="drain")
    futures = a.ask(requests(1))
    until(lambda: len(a.run.notes("asked")) == 4)
    a.run.sync(2)
    assert {f.result(0).versions for f in futures} == {((0, 1),)}


@pytest.mark.full
def test_nothing_is_sampled_during_a_pause(asking):
    a = asking()
    a.ask(requests(1, 1))[0].result(60)
    a.run.engines.pause()
    a.run.engines.pause()
    [waiting] = a.ask(requests(1, 1))
    a.run.engines.resume()
    time.sleep(0.3)
    assert not waiting.done()
    a.run.engines.resume()
    assert waiting.result(60).versions == ((0, 1),)


@pytest.mark.full
def test_the_first_request_also_waits_for_the_end_of_a_pause(asking):
    a = asking()
    a.run.engines.pause()
    [waiting] = a.ask(requests(1, 1))
    time.sleep(0.3)
    assert not waiting.done()
    a.run.engines.resume()
    assert waiting.result(60).versions == ((0, 1),)


def test_the_requests_of_a_killed_engine_go_to_the_others(a):
    queries = requests(2)
    futures = a.ask(queries)
    until(lambda: a.run.engines.unfinished_tokens() == 80)
    os.kill(a.run.pids()[0], signal.SIGKILL)
    assert {n: [*f.result(60).ids] for n, f in enumerate(futures)} == expected(a.run.weights, queries)
    assert len(a.run.notes("asked")) == 12, "the four of the killed engine are sampled again"
    assert a.run.engines.restarted() == {"engine": 40}
    assert a.run.engines.restarted() == {}
    a.run.sync(2)
    assert len(a.run.notes("started")) == 3, "the sync replaced it"


def test_the_requests_of_an_engine_that_dies_in_a_load_are_sampled_again(a):
    queries = requests(2)
    futures = a.ask(queries)
    until(lambda: a.run.engines.unfinished_tokens() == 80)
    (a.run.folder / "die-in-take").touch()
    a.run.sync(2)
    assert {n: [*f.result(60).ids] for n, f in enumerate(futures)} == expected(a.run.weights, queries)
    assert len(a.run.notes("asked")) == 12
    assert a.run.engines.restarted() == {"engine": 40}
    until(lambda: a.run.engines.unfinished_tokens() == 0)


@pytest.mark.full
def test_tokens_that_new_weights_throw_away_are_counted(asking):
    a = asking(seconds=1.0, in_flight="restart")
    futures = a.ask(requests(1))
    until(lambda: a.run.engines.unfinished_tokens() == 40)
    a.run.sync(2)
    for future in futures:
        future.result(60)
    assert a.run.engines.restarted() == {"weights": 40}


@pytest.mark.full
def test_requests_wait_until_the_only_engine_is_replaced(asking):
    a = asking(engines=1, seconds=0.5)
    queries = requests(1)
    futures = a.ask(queries)
    until(lambda: len(a.run.notes("asked")) == 4)
    os.kill(a.run.pids()[0], signal.SIGKILL)
    until(lambda: a.run.engines.pool.dead)
    assert not any(f.done() for f in futures)
    a.run.engines.repair()
    assert {n: [*f.result(60).ids] for n, f in enumerate(futures)} == expected(a.run.weights, queries)
    assert a.run.pushes == 2, "the new engine got the current weights"


@pytest.mark.full
def test_generate_works_beside_single_requests_and_replaces_engines(asking):
    a = asking(engines=1, seconds=0.5)
    a.ask([ENDLESS])
    until(lambda: a.run.notes("asked"))
    queries = requests(1)
    assert {n: [*t.ids] for n, t in a.run.engines.generate(queries)} == expected(a.run.weights, queries)
    running = a.run.engines.generate(requests(2, 1))
    os.kill(a.run.pids()[0], signal.SIGKILL)
    assert {n for n, _ in running} == {0, 1}


@pytest.mark.full
def test_an_engines_error_ends_every_request(asking):
    a = asking()
    futures = a.ask([ENDLESS, GenerationRequest((1,), -1, Sampling(8))])
    for future in futures:
        with pytest.raises(RolloutError, match=r"engine \d .*advance\(\) raised ValueError: a request that no engine"):
            future.result(60)
    with pytest.raises(RolloutError, match="a request that no engine survives"):
        a.ask([ENDLESS])[0].result(60)
    with pytest.raises(RolloutError, match="a request that no engine survives"):
        a.run.engines.pause()


@pytest.mark.full
def test_more_deaths_than_max_restarts_end_the_run(asking):
    a = asking(engines=1, max_restarts=0)
    a.ask([ENDLESS])
    until(lambda: a.run.notes("asked"))
    os.kill(a.run.pids()[0], signal.SIGKILL)
    until(lambda: a.run.engines.pool.dead)
    with pytest.raises(WorkerError, match="0 engines were already replaced"):
        a.run.engines.repair()


@pytest.mark.full
def test_an_engine_that_does_not_answer_ends_the_run(asking, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # for the report about the engine
    a = asking(engines=1, heartbeat=1.0)
    a.ask(requests(1, 1))[0].result(60)
    os.kill(a.run.pids()[0], signal.SIGSTOP)
    with pytest.raises(WorkerError, match="engine 0"):
        a.ask([ENDLESS])[0].result(60)
