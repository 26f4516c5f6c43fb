"""The turns that a resumed sample finds again."""

from __future__ import annotations

from array import array
from dataclasses import replace

import pytest
from rlhf.ops.experts import drop_repeated
from rlhf.types import ExpertRecord, GenerationRequest, Sampling, Turn
from rlhf_runtime.samples.sample_context import TurnLog

FIRST, SECOND, THIRD = (GenerationRequest(array("i", [5] * n), n, Sampling(max_new_tokens=8)) for n in (1, 2, 3))
OTHER_IDS = replace(SECOND, ids=array("i", [5, 7]))
OTHER_WEIGHTS = replace(SECOND, base=True)
OTHER_SAMPLING = replace(SECOND, sampling=Sampling(max_new_tokens=9))


def turn(token: int) -> Turn:
    return Turn(array("i", [token]), True, [-1.0], ((0, 0),), "stop")


@pytest.fixture
def log() -> TurnLog:
    """Three turns, added in another order than they were sampled."""
    result = TurnLog()
    for number, request in ((2, THIRD), (0, FIRST), (1, SECOND)):
        result.add(number, request, turn(number))
    return result


def test_a_turn_is_found_by_its_number_and_context(log: TurnLog) -> None:
    for number, request in enumerate((FIRST, SECOND, THIRD)):
        assert log.find(number, request) == turn(number)
    assert log.find(3, THIRD) is None
    assert log.find(0, replace(FIRST, seed=99)) == turn(0), "the seed of a turn is given by its number"


@pytest.mark.parametrize(
    "other_request",
    [OTHER_IDS, OTHER_WEIGHTS, OTHER_SAMPLING],
    ids=["tokens", "weights", "sampling parameters"],
)
def test_a_changed_context_drops_its_turn_and_all_later_ones(log: TurnLog, other_request: GenerationRequest) -> None:
    assert log.find(1, other_request) is None
    assert log.find(1, SECOND) is None, "it was sampled in an episode that is over"
    assert log.find(2, THIRD) is None
    assert log.find(0, FIRST) == turn(0)


def test_turns_that_are_sampled_after_a_change_are_kept(log: TurnLog) -> None:
    log.find(1, OTHER_IDS)
    log.add(1, OTHER_IDS, turn(9))
    assert log.find(1, OTHER_IDS) == turn(9)
    assert [(number, value) for number, _, value in log.entries()] == [(0, turn(0)), (1, turn(9))]


def test_a_turn_stays_as_it_was_sampled(log: TurnLog) -> None:
    """A rollout sets the reward and the end of a turn. In the resumed sample, another turn may be its last one."""
    for _ in range(2):
        last = log.find(2, THIRD)
        assert last == turn(2)
        last.reward, last.score, last.finish = 1.0, 1.0, "length"
    new = turn(3)
    log.add(3, THIRD, new)
    new.reward, new.finish = 1.0, "length"
    assert [value for _, _, value in log.entries()] == [turn(number) for number in range(4)]
    assert TurnLog(log.entries()).find(3, THIRD) == turn(3)


def test_experts_that_the_end_of_the_sample_removes_are_removed_here_too(log: TurnLog) -> None:
    prompt, observation = Turn([5], False), Turn([6], False)
    answers = [replace(turn(3), experts=ExpertRecord(bytes(tokens), 1, 4, 1)) for tokens in (1, 3)]
    for number, answer in enumerate(answers, 3):
        log.add(number, THIRD, answer)
    drop_repeated([prompt, answers[0], observation, answers[1]])
    assert [len(value.experts.choices) for _, _, value in log.entries()[3:] if value.experts] == [1, 2]
