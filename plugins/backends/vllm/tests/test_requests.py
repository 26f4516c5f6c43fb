"""A sample takes vLLM's outputs, and ends with the token that completes a stop string."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from rlhf.types import GenerationRequest, Sampling
from rlhf_plugin_vllm.requests import VllmRequest

PIECES = ["a", "b", "END", "EN", "D"]


def output(ids, finish=None):
    part = SimpleNamespace(
        token_ids=ids, logprobs=SimpleNamespace(logprobs=[-0.5] * len(ids)), finish_reason=finish, stop_reason=None
    )
    return SimpleNamespace(outputs=[part], finished=finish is not None)


@pytest.mark.parametrize(
    ("outputs", "ids"),
    [
        ([[0, 2, 1]], [0, 2]),  # further tokens came in the same step
        ([[0], [3], [4, 0]], [0, 3, 4]),
        ([[0, 3], [4]], [0, 3, 4]),
    ],
)
def test_a_sample_ends_with_the_token_that_completes_a_stop_string(outputs, ids):
    request = GenerationRequest([0], 0, Sampling(stop=("END",), max_new_tokens=9))
    sample = VllmRequest(0, request, lambda tokens: "".join(PIECES[t] for t in tokens), version=3)
    *early, last = [sample.take(output(part)) for part in outputs]
    assert early == [None] * len(early)
    turn, must_abort = last
    assert (list(turn.ids), len(turn.logprobs), turn.finish, must_abort) == (ids, len(ids), "stop", True)


def test_without_a_stop_string_a_sample_ends_when_vllm_ends_it():
    sample = VllmRequest(0, GenerationRequest([0], 0, Sampling(stop=("END",))), lambda ids: "a" * len(ids), version=3)
    assert sample.take(output([0, 1])) is None
    turn, must_abort = sample.take(output([1], "length"))
    assert (list(turn.ids), turn.finish, must_abort) == ([0, 1, 1], "length", False)
