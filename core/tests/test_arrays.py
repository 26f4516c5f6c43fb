"""What the constructors of turns, requests and sequences make of the numbers they are given."""

import pickle
from array import array

import numpy
import pytest
import torch
from rlhf.types import GenerationRequest, Sampling, Turn
from rlhf.types.examples import Sequence

MAKERS = {
    "Turn.ids": lambda ids: Turn(ids, sampled=False).ids,
    "GenerationRequest.ids": lambda ids: GenerationRequest(ids, 0, Sampling()).ids,
    "Sequence.ids": lambda ids: Sequence(ids, [False] * len(ids)).ids,
}


@pytest.fixture(params=MAKERS)
def named(request):
    return request.param, MAKERS[request.param]


@pytest.mark.parametrize(
    "ids", [[1, 2, 70000], (1, 2, 70000), array("q", [1, 2, 70000]), numpy.array([1, 2, 70000], "int32")]
)
def test_any_sequence_of_ints_becomes_an_array(ids):
    result = Turn(ids, sampled=False).ids
    assert result == array("i", [1, 2, 70000])
    assert result.typecode == "i"
    assert [type(i) for i in result] == [int] * 3


def test_bytes_are_numbers_from_0_to_255():
    assert Turn(b"\x05\x00\x00\x00", sampled=False).ids == array("i", [5, 0, 0, 0])


def test_an_array_is_kept_and_not_copied(named):
    ids = array("i", [1, 2])
    assert named[1](ids) is ids
    assert named[1]([1, 2]) == ids


@pytest.mark.parametrize(
    ("ids", "error", "message"),
    [
        ([1, 2.0], TypeError, r"holds 2.0 \(float\); allowed: ints below 2\*\*31"),
        ([True], TypeError, r"holds True \(bool\)"),
        ("12", TypeError, r"holds '1' \(str\)"),
        ([None], TypeError, r"holds None \(NoneType\)"),
        (array("f", [1.0]), TypeError, r"holds 1.0 \(float\)"),
        ([2**31], ValueError, r"holds 2147483648; allowed: ints below 2\*\*31"),
        (
            torch.tensor([1, 2]),
            TypeError,
            r"is tensor.*; allowed: a sequence of ints .*\(write .tolist\(\)\)",
        ),
        (numpy.array([[1, 2]], "int32"), TypeError, r"is array\(\[\[1, 2\]\], dtype=int32\); allowed: a sequence"),
        (None, TypeError, "is None; allowed: a sequence of ints"),
    ],
)
def test_anything_else_is_refused(ids, error, message):
    with pytest.raises(error, match=f"^Turn.ids {message}"):
        Turn(ids, sampled=False)


def test_a_refusal_names_what_was_made(named):
    name, make = named
    with pytest.raises(TypeError, match=rf"^{name} holds 2.0 \(float\)"):
        make([1, 2.0])


@pytest.mark.parametrize("values", [[-0.5, 0], (-0.5, 0.0), numpy.array([-0.5, 0], "float32"), array("d", [-0.5, 0])])
def test_log_probs_become_float32(values):
    logprobs = Turn([1, 2], True, values).logprobs
    assert logprobs == array("f", [-0.5, 0.0])
    assert logprobs.typecode == "f"


def test_what_is_assigned_becomes_an_array_too():
    turn = Turn([1], False)
    turn.ids, turn.logprobs = [2, 3], [-0.5, -1.5]
    assert turn == Turn([2, 3], False, [-0.5, -1.5])
    turn.logprobs = None
    with pytest.raises(TypeError, match=r"^Turn.ids holds 1.0 \(float\)"):
        turn.ids = [1.0]
    with pytest.raises(TypeError, match=r"^Turn.logprobs holds 'x'"):
        turn.logprobs = ["x"]


def test_log_probs_are_rounded_to_float32():
    assert Turn([1], True, [-0.1]).logprobs[0] == float(numpy.float32(-0.1))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([None], r"holds None \(NoneType\); allowed: floats"),
        ([True], r"holds True \(bool\)"),
        (["x"], "holds 'x'"),
        (0.5, "is 0.5; allowed: a sequence of floats"),
        (torch.tensor([0.5]), r"\(write .tolist\(\)\)"),
    ],
)
def test_log_probs_that_are_no_numbers_are_refused(values, message):
    with pytest.raises(TypeError, match=f"^Turn.logprobs .*{message}"):
        Turn([1], True, values)


def test_turns_and_requests_travel_as_bytes():
    turn = Turn(range(1000), True, [-1.5] * 1000)
    assert pickle.loads(pickle.dumps(turn)) == turn
    assert len(pickle.dumps(turn)) < 8 * 1000 + 500
    requests = [GenerationRequest(turn.ids, seed, Sampling()) for seed in range(8)]
    assert len(pickle.dumps(requests)) < 4 * 1000 + 2000, "requests of one prompt send its tokens once"
    assert pickle.loads(pickle.dumps(requests)) == requests
