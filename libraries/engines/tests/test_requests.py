"""A sample ends where the engine ends it, or at an end token that the engine was not told."""

from __future__ import annotations

import pytest
from rlhf.errors import ModelError
from rlhf.types import GenerationRequest, Sampling
from rlhf_engines.requests import NewTokens, OpenRequest


def opened(**sampling: object) -> OpenRequest:
    request = GenerationRequest([0], 0, Sampling(9, **sampling))
    return OpenRequest(3, request, lambda ids: "".join("abcd"[n] for n in ids), 5, "Engine", {3})


def test_an_end_token_that_the_engine_was_not_told_ends_the_sample():
    sample = opened()
    assert sample.watches
    assert sample.add(NewTokens([0, 1], [-1.0, -2.0], None)) is None
    turn, must_abort = sample.add(NewTokens([2, 3, 0], [-3.0, -4.0, -5.0], None))
    assert (turn.text, list(turn.logprobs), turn.finish, must_abort) == ("abcd", [-1, -2, -3, -4], "stop", True)
    assert turn.versions == ((0, 5),)


@pytest.mark.parametrize(
    ("tokens", "reason"),
    [
        (NewTokens([0], [-1.0], "abort", "memory"), r"Engine ended request 3 with 'abort' \('memory'\)"),
        (NewTokens([0], [float("nan")], "length"), "Engine reports log-probs .* of request 3: the weights hold NaN"),
        (NewTokens([0], [], "length"), "for 1 tokens"),
    ],
)
def test_an_answer_that_is_no_sample_is_refused(tokens, reason):
    with pytest.raises(ModelError, match=reason):
        opened(stop=("x",)).add(tokens)
