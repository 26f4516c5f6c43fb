"""Every rank gets the same number of non-empty micro-batches; every unit is computed once and counted once."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rlhf_runtime.models.dispatch import fillers, micro_batches, plan
from rlhf_testing import fabricate

lengths = st.lists(st.integers(1, 300), min_size=1, max_size=60)
groups = st.lists(st.tuples(st.integers(1, 9), st.integers(0, 300), st.integers(1, 80)), min_size=1, max_size=12)
"""(samples, tokens of the prompt, tokens of each answer) of every prompt."""


def batch_of(groups):
    """(tokens per unit, order, shared), with the units of a group far from each other."""
    members = [
        (g, prompt, prompt + answer) for g, (samples, prompt, answer) in enumerate(groups) for _ in range(samples)
    ]
    place = {u: (u * 7) % len(members) if len(members) % 7 else u for u in range(len(members))}
    tokens, order, shared = [0] * len(members), [], []
    for u, (g, prompt, length) in enumerate(members):
        tokens[place[u]] = length
        order.append(place[u])
        shared.append(prompt if u and members[u - 1][0] == g else 0)
    return tokens, order, shared


def computed(units, tokens, order, shared):
    """Tokens that a micro-batch of these units computes: two of them share what all between them in the order share."""
    positions = sorted(order.index(u) for u in units)
    return sum(tokens[u] for u in units) - sum(min(shared[a + 1 : b + 1]) for a, b in pairwise(positions))


@settings(max_examples=100, deadline=None)
@given(lengths, st.integers(1, 5), st.integers(1, 400))
def test_every_unit_is_placed_once_and_no_rank_is_idle(tokens, ranks, budget):
    shares = plan(tokens, ranks, budget)
    assert len(shares) == ranks
    assert len({len(rank) for rank in shares}) == 1, "ranks with different micro-batch counts hang sharded trainers"
    assert all(units for rank in shares for units in rank)
    placement = [u for rank in shares for units in rank for u in units]
    repeated = [u for rank in fillers(shares) for units in rank for u in units]
    assert sorted(placement) == sorted([*range(len(tokens)), *repeated])


@settings(max_examples=100, deadline=None)
@given(lengths, st.integers(1, 5), st.integers(1, 400))
def test_micro_batches_keep_the_token_budget(tokens, ranks, budget):
    for rank in plan(tokens, ranks, budget):
        for units in rank:
            assert len(units) == 1 or sum(tokens[u] for u in units) <= budget


def test_five_units_on_four_ranks_leave_no_rank_without_work():
    shares = plan([10, 10, 10, 10, 10], ranks=4, budget=10)
    assert [len(rank) for rank in shares] == [2, 2, 2, 2]
    assert sum(len(units) for rank in fillers(shares) for units in rank) == 3


def test_a_rank_without_work_repeats_the_shortest_unit():
    assert plan([30, 9, 40], ranks=4, budget=40) == [[[2]], [[0]], [[1]], [[1]]]
    assert fillers([[[2]], [[0]], [[1]], [[1]]]) == [[[]], [[]], [[]], [[1]]]
    assert plan([9, 30, 9], ranks=4, budget=40) == [[[1]], [[0]], [[2]], [[2]]], "of equals the last"


def test_a_unit_over_the_budget_is_alone():
    shares = plan([500, 10, 10], ranks=1, budget=100)
    assert [0] in shares[0]


def test_an_empty_batch_is_refused():
    with pytest.raises(ValueError, match="nothing to dispatch"):
        plan([], 1, 10)


def test_a_lone_long_unit_is_computed_once():
    assert plan([3000], ranks=1, budget=1000) == [[[0]]]
    assert plan([3000, 2000], ranks=1, budget=1000) == [[[0], [1]]]


@settings(max_examples=100, deadline=None)
@given(groups, st.integers(1, 5), st.integers(1, 1500))
def test_shared_prefixes_keep_every_guarantee(groups, ranks, budget):
    tokens, order, shared = batch_of(groups)
    shares = plan(tokens, ranks, budget, order, shared)
    assert shares == plan(tokens, ranks, budget, order, shared)
    assert len({len(rank) for rank in shares}) == 1
    assert all(units for rank in shares for units in rank)
    placement = [u for rank in shares for units in rank for u in units]
    repeated = [u for rank in fillers(shares) for units in rank for u in units]
    assert sorted(placement) == sorted([*range(len(tokens)), *repeated])
    for rank in shares:
        for units in rank:
            assert len(units) == 1 or computed(units, tokens, order, shared) <= budget


@settings(max_examples=100, deadline=None)
@given(groups, st.integers(1, 5), st.integers(1, 1500))
def test_shared_prefixes_never_make_a_plan_longer(groups, ranks, budget):
    def longest(shares):  # of the ranks, in every micro-batch, and what a micro-batch costs
        parts = zip(*shares, strict=True)
        return sum(max(computed(units, tokens, order, shared) for units in m) + budget / 32 for m in parts)

    tokens, order, shared = batch_of(groups)
    plain_plan = plan(tokens, ranks, budget)
    without_luck = sum(
        max(sum(tokens[u] for u in units) for units in m) + budget / 32 for m in zip(*plain_plan, strict=True)
    )
    assert longest(plan(tokens, ranks, budget, order, shared)) <= without_luck


def test_the_samples_of_a_prompt_are_in_one_micro_batch():
    tokens, order, shared = batch_of([(8, 200, 64)] * 16)
    [micros] = plan(tokens, 1, 2048, order, shared)
    assert sum(computed(units, tokens, order, shared) for units in micros) == 16 * (200 + 8 * 64)
    assert len(micros) == 8
    assert len(plan(tokens, 1, 2048)[0]) > 16


def test_a_group_is_cut_where_a_rank_would_be_idle_or_the_budget_is_exceeded():
    single = batch_of([(8, 200, 64)])
    assert [[len(m) for m in rank] for rank in plan(single[0], 2, 2048, *single[1:])] == [[4], [4]]
    assert [len(m) for m in plan(single[0], 1, 500, *single[1:])[0]] == [4, 4]
    three = batch_of([(8, 100, 100)] * 3)  # 900 tokens each: two ranks would need 1800 with whole ones
    loads = [sum(computed(m, *three) for m in rank) for rank in plan(three[0], 2, 4096, *three[1:])]
    assert max(loads) <= 1600


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_micro_batches_are_the_selected_units_in_one_memory(ranks):
    batch = fabricate.batch(1).with_column("unit", "n", torch.arange(6))
    batch = batch.with_column("tok", "wide", torch.rand(batch.tokens, 2)).with_column(
        "seq", "half", torch.arange(batch.sequences).bfloat16()
    )
    shares = plan(batch.tokens_per_unit(), ranks, 12)
    assert ranks < 4 or any(units for rank in fillers(shares) for units in rank), "a unit is in two micro-batches"
    micros = micro_batches(batch, shares)
    assert [len(rank) for rank in micros] == [len(rank) for rank in shares]
    flat = [pair for rank, units in zip(micros, shares, strict=True) for pair in zip(rank, units, strict=True)]
    for micro, units in flat:
        want = batch.select(units)
        for name in ("ids_N", "lens_B", "unit_B", "role_B"):
            assert torch.equal(getattr(micro, name), getattr(want, name)), name
        for level in ("tok", "seq", "unit"):
            columns = getattr(want, level)
            assert getattr(micro, level).keys() == columns.keys()
            assert all(torch.equal(getattr(micro, level)[name], values) for name, values in columns.items())
    for name in batch.tok:
        assert len({micro.tok[name].untyped_storage().data_ptr() for micro, _ in flat}) == 1, name
