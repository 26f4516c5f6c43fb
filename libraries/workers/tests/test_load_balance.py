"""The assignment of requests to engines."""

from __future__ import annotations

from rlhf.types import GenerationRequest, Sampling
from rlhf_workers.engines.front import assign_requests


def requests(*groups: tuple[int, int, int]) -> list[GenerationRequest]:
    """Groups of (samples, prompt length, budget), each with a prompt of its own."""
    result = []
    for number, (samples, length, budget) in enumerate(groups):
        ids = (number, *[0] * (length - 1))
        result += [GenerationRequest(ids, seed, Sampling(max_new_tokens=budget)) for seed in range(samples)]
    return result


def loads(queries, shares):
    return [
        sum(queries[p].sampling.max_new_tokens for p in share) + sum(map(len, {tuple(queries[p].ids) for p in share}))
        for share in shares
    ]


def test_every_request_is_given_to_one_engine():
    queries = requests((3, 5, 7), (1, 50, 7), (8, 2, 2))
    for engines in range(1, 6):
        shares = assign_requests(queries, engines)
        assert len(shares) == engines
        assert sorted(p for share in shares for p in share) == list(range(len(queries)))
        assert shares == assign_requests(queries, engines)


def test_samples_of_a_prompt_stay_together():
    queries = requests(*[(8, 10, 64)] * 16)
    shares = assign_requests(queries, 4)
    assert [len(share) for share in shares] == [32] * 4
    owners = {}
    for engine, share in enumerate(shares):
        for p in share:
            assert owners.setdefault(queries[p].ids.tobytes(), engine) == engine


def test_the_heaviest_groups_go_first_to_the_least_loaded_engine():
    queries = requests((1, 10, 100), (1, 10, 10), (1, 10, 90), (1, 10, 20))
    assert assign_requests(queries, 2) == [[0, 1], [2, 3]]
    long_prompt = requests((1, 1000, 10), (1, 10, 10), (1, 10, 10))
    assert assign_requests(long_prompt, 2) == [[0], [1, 2]]


def test_a_prompt_with_more_than_a_fair_share_is_split():
    queries = requests((64, 10, 64))
    shares = assign_requests(queries, 4)
    assert [len(share) for share in shares] == [16] * 4
    uneven = requests((12, 10, 64), (2, 10, 64), (2, 10, 64))
    assert max(loads(uneven, assign_requests(uneven, 2))) < 0.6 * sum(loads(uneven, assign_requests(uneven, 2)))


def test_fewer_requests_than_engines():
    assert assign_requests(requests((1, 3, 4)), 3) == [[0], [], []]
    assert assign_requests([], 2) == [[], []]
