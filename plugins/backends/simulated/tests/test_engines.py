"""Idle time of simulated engines, with a clock that the test sets."""

from __future__ import annotations

import random

import pytest
from rlhf_plugin_simulated.pool import Engines


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_seconds_without_a_request_are_counted_for_each_engine(clock: Clock) -> None:
    engines = Engines(2, clock)
    clock.now += 3  # both idle
    first = engines.begin()
    clock.now += 2  # one idle
    second = engines.begin()
    clock.now += 5  # none idle
    engines.end(first)
    clock.now += 1  # one idle
    assert engines.idle() == (3 * 2 + 2 + 1, 11 * 2)
    clock.now += 4
    assert engines.idle() == (4, 8), "only what came after the last call"
    assert {first, second} == {0, 1}


def test_a_request_goes_to_the_engine_with_the_fewest(clock: Clock) -> None:
    engines = Engines(3, clock)
    assert sorted(engines.begin() for _ in range(6)) == [0, 0, 1, 1, 2, 2]
    engines.end(1)
    assert engines.begin() == 1


def test_many_requests_find_the_engine_that_a_look_at_all_would_find(clock: Clock) -> None:
    draw, engines, requests = random.Random(0), Engines(7, clock), [0] * 7
    idle = 0.0
    for _ in range(500):
        clock.now += 1
        idle += requests.count(0)
        if sum(requests) and draw.random() < 0.5:
            engine = draw.choice([engine for engine, count in enumerate(requests) if count])
            engines.end(engine)
            requests[engine] -= 1
        else:
            assert engines.begin() == requests.index(min(requests))
            requests[requests.index(min(requests))] += 1
    assert engines.idle() == (idle, 500 * 7)
