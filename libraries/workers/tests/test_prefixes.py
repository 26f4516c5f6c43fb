"""Which engine gets a request: one that knows its prefix, unless it has too many requests."""

from __future__ import annotations

import itertools
import random
from array import array
from collections import Counter

import pytest
from rlhf_workers.engines import single_requests
from rlhf_workers.engines.single_requests import Prefixes, prefix_marks


def tokens(seed: int, length: int) -> array[int]:
    draw = random.Random(seed)
    return array("i", [draw.randrange(2**31) for _ in range(length)])


@pytest.mark.parametrize("length", [1, 15, 16, 17, 1000])
def test_the_marks_of_a_request_are_of_its_beginnings(length: int) -> None:
    ids = tokens(0, length)
    marks = prefix_marks(ids)
    assert [end for end, _ in marks] == sorted({end for end, _ in marks})
    assert marks[-1][0] == length
    longer = dict(prefix_marks(ids + tokens(1, 50)))
    assert all(longer[end] == checksum for end, checksum in marks[:-1])
    assert all(b <= max(16, 1.25 * a) for (a, _), (b, _) in itertools.pairwise(marks))


def test_the_turns_of_a_conversation_go_to_one_engine() -> None:
    prefixes, loads = Prefixes(), {0: 5, 1: 5, 2: 4}
    conversation = tokens(0, 300)
    first = prefixes.choose(prefix_marks(conversation), loads)
    assert first == 2, "the one with the fewest requests"
    for turn in range(1, 6):
        other = prefixes.choose(prefix_marks(tokens(turn, 300)), {0: 1, 1: 2, 2: 2})
        assert other == 0
        conversation += tokens(100 + turn, 100)
        assert prefixes.choose(prefix_marks(conversation), {0: 4, 1: 4, 2: 5}) == first


def test_an_engine_with_too_many_requests_is_left_out() -> None:
    prefixes, marks = Prefixes(), prefix_marks(tokens(0, 100))
    assert prefixes.choose(marks, {0: 0, 1: 0}) == 0
    assert prefixes.choose(marks, {0: 1, 1: 0}) == 0
    assert prefixes.choose(marks, {0: 2, 1: 0}) == 1
    assert prefixes.choose(marks, {0: 10, 1: 12}) == 1
    assert prefixes.choose(marks, {0: 10, 1: 13}) == 0


def test_an_engine_that_died_is_not_chosen() -> None:
    prefixes, marks = Prefixes(), prefix_marks(tokens(0, 100))
    assert prefixes.choose(marks, {0: 0, 1: 1}) == 0
    assert prefixes.choose(marks, {1: 1}) == 1


def test_the_longest_prefix_decides() -> None:
    prefixes = Prefixes()
    system, a, b = tokens(0, 400), tokens(1, 400), tokens(2, 400)
    assert prefixes.choose(prefix_marks(system + a), {0: 0, 1: 1}) == 0
    assert prefixes.choose(prefix_marks(system + b), {0: 2, 1: 0}) == 1
    assert prefixes.choose(prefix_marks(system + a + a), {0: 1, 1: 1}) == 0
    assert prefixes.choose(prefix_marks(system + b + b), {0: 1, 1: 1}) == 1


def test_all_engines_are_used_when_every_request_shares_a_prefix() -> None:
    prefixes, system = Prefixes(), tokens(0, 400)
    loads = Counter(dict.fromkeys(range(4), 0))
    for number in range(400):
        loads[prefixes.choose(prefix_marks(system + tokens(number, 40)), loads)] += 1
    assert max(loads.values()) <= 1.25 * min(loads.values()) + 1


def test_prefixes_that_were_not_used_for_long_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(single_requests, "LIMIT", 20)
    prefixes, old, recent = Prefixes(), prefix_marks(tokens(0, 20)), prefix_marks(tokens(1, 20))
    for marks in (old, recent):
        assert prefixes.choose(marks, {0: 0, 1: 1}) == 0
    for number in range(2, 20):
        prefixes.choose(prefix_marks(tokens(number, 20)), {0: 1, 1: 0})
        assert prefixes.choose(recent, {0: 0, 1: 0}) == 0
    assert prefixes.choose(old, {0: 1, 1: 0}) == 1
