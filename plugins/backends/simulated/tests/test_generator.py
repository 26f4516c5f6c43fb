"""The simulated generator: the same turns in every way of asking, and deaths. On a clock that the tests set."""

from __future__ import annotations

import asyncio
import random
import time

import pytest
from generator_cases import dies_once, make, play, request
from rlhf.types import Turn
from rlhf_plugin_simulated.generator import SLICE

# ----------------------------------------------------------------------------------------- turns


def test_generate_and_answer_give_the_same_turns(clock) -> None:
    requests = [request(seed, 60 + seed) for seed in range(20)]
    options = {"tokens": 60.0, "tokens_sigma": 0.5, "engines": 2, "slots": 3}
    turns = dict(make(**options).generate(requests))

    async def scenario() -> None:
        generator = make(**options)
        answers = asyncio.gather(*(generator.answer(query) for query in requests))
        await clock.pass_(1000.0)
        assert await answers == [turns[n] for n in range(20)]

    play(scenario)
    assert {turn.finish for turn in turns.values()} == {"stop", "length"}
    for number, turn in turns.items():
        assert turn.logprobs is not None
        assert len(turn.logprobs) == len(turn.ids) <= 60 + number
        assert (turn.ids[-1] == 1) == (turn.finish == "stop") == (len(turn.ids) < 60 + number)


def test_engines_answer_in_the_order_of_their_ends(clock) -> None:
    """Three requests of 10, 30 and 20 seconds on one slot, and on three."""
    requests = [request(0, max_new_tokens=n) for n in (80, 240, 160)]
    ends = {}
    for position, _ in make(tokens=1000.0, slots=1).generate(requests):
        ends[position] = clock.now
    assert list(ends) == [0, 1, 2]
    slices = 3 * SLICE  # rounding may end each of three samples one slice later
    assert ends == pytest.approx({0: 10.0, 1: 40.0, 2: 60.0}, abs=slices)
    clock.now = 0.0
    assert [position for position, _ in make(tokens=1000.0, slots=3).generate(requests)] == [0, 2, 1]
    assert clock.now == pytest.approx(30.0, abs=slices)


def test_a_request_waits_for_a_free_slot(clock) -> None:
    async def scenario() -> None:
        generator = make(engines=2, slots=1)
        answers = [asyncio.create_task(generator.answer(request(n))) for n in range(3)]
        await clock.pass_(10.0)
        assert [answer.done() for answer in answers] == [True, True, False]
        await clock.pass_(10.0)
        assert answers[2].done()

    play(scenario)


def test_a_cancelled_answer_frees_its_slot(clock) -> None:
    async def scenario() -> None:
        generator = make(slots=1)
        first, second = (asyncio.create_task(generator.answer(request(n))) for n in range(2))
        await clock.pass_(5.0)
        first.cancel()
        await clock.pass_(10.0)
        assert second.done()

    play(scenario)


# ---------------------------------------------------------------------------------------- slices


def test_slices_give_the_turns_of_a_whole_batch(clock) -> None:
    requests = {name: request(name) for name in range(5)}
    options = {"tokens_sigma": 0.5, "slots": 2}
    turns = dict(make(**options).generate(list(requests.values())))
    generator = make(**options)
    answers = dict(generator.advance({name: requests[name] for name in (0, 3, 1)}, seconds=1.0))
    assert not answers
    answers |= generator.advance({name: requests[name] for name in (2, 4)}, dropped=[3], seconds=100.0)
    assert answers == {name: turns[name] for name in (0, 1, 2, 4)}


@pytest.mark.parametrize(
    ("in_flight", "left", "running", "waiting"),
    [
        ("continue", 4.875, ((0, 0), (24, 1), (40, 2), (41, 3)), ((0, 3),)),
        ("restart", 10.0, ((0, 3),), ((0, 3),)),
    ],
)
def test_weights_that_come_between_slices(clock, in_flight, left, running, waiting) -> None:
    """After 3 s version 1, after 2 s more version 2, one token later version 3. The second request waits for the only
    slot."""
    generator = make(in_flight, slots=1)
    assert generator.advance({0: request(0), 1: request(1)}, seconds=3.0) == []
    for version, seconds in ((1, 2.0), (2, 0.0), (3, left)):
        generator.begin_load(version)
        generator.end_load()
        answers = generator.advance({}, seconds=seconds)
    [(name, turn)] = answers
    assert (name, turn.versions) == (0, running)
    [(name, turn)] = generator.advance({}, seconds=10.0)
    assert (name, turn.versions) == (1, waiting)


def test_a_slice_samples_again_what_an_engine_was_sampling_when_it_died(clock) -> None:
    """The engine dies once, after 10 s. Its weights were of version 1 from 3 s on, so that all tokens of the second try
    are."""
    generator = make(seed=dies_once(), deaths=0.5)
    assert generator.advance({0: request(0)}, seconds=3.0) == []
    generator.begin_load(1)
    generator.end_load()
    assert generator.advance({}, seconds=16.875) == []
    [(_, turn)] = generator.advance({}, seconds=0.125)
    assert turn.versions == ((0, 1),)
    assert turn.ids == make().advance({0: request(0)}, seconds=10.0)[0][1].ids


# ---------------------------------------------------------------------------------------- deaths


def test_samples_whose_engine_dies_are_sampled_again_and_give_the_same_turn(clock) -> None:
    draw = random.Random(7)
    tries = [next(n for n in range(1, 100) if draw.random() >= 0.5) for _ in range(10)]
    assert max(tries) > 2

    async def scenario() -> None:
        dying, living = make(seed=7, deaths=0.5), make()
        for number, count in enumerate(tries):
            answer = asyncio.create_task(dying.answer(request(number)))
            await clock.pass_(10.0 * count - 0.125)
            assert not answer.done()
            await clock.pass_(0.125)
            repetition = asyncio.create_task(living.answer(request(number)))
            await clock.pass_(10.0)
            assert await answer == await repetition

    play(scenario)


def test_answers_take_their_time_on_the_real_clock() -> None:
    """10 s at 100 simulated seconds a second."""
    start = time.monotonic()
    turn = asyncio.run(make(speed=100.0).answer(request(0)))
    assert time.monotonic() - start >= 0.1
    assert isinstance(turn, Turn)
