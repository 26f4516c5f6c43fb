"""Every rank gets the same number of non-empty micro-batches; every unit is computed once and counted once."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rlhf.controller.dispatch import fillers, plan

lengths = st.lists(st.integers(1, 300), min_size=1, max_size=60)


@settings(max_examples=200, deadline=None)
@given(lengths, st.integers(1, 5), st.integers(1, 400))
def test_every_unit_is_placed_once_and_no_rank_is_idle(tokens, ranks, budget):
    shares = plan(tokens, ranks, budget)
    assert len(shares) == ranks
    assert len({len(rank) for rank in shares}) == 1, "ranks with different micro-batch counts hang sharded trainers"
    assert all(units for rank in shares for units in rank)
    placed = [u for rank in shares for units in rank for u in units]
    repeated = [u for rank in fillers(shares) for units in rank for u in units]
    assert sorted(placed) == sorted([*range(len(tokens)), *repeated])


@settings(max_examples=200, deadline=None)
@given(lengths, st.integers(1, 5), st.integers(1, 400))
def test_micro_batches_keep_the_token_budget(tokens, ranks, budget):
    for rank in plan(tokens, ranks, budget):
        for units in rank:
            assert len(units) == 1 or sum(tokens[u] for u in units) <= budget


def test_five_units_on_four_ranks_leave_no_rank_without_work():
    shares = plan([10, 10, 10, 10, 10], ranks=4, budget=10)
    assert [len(rank) for rank in shares] == [2, 2, 2, 2]
    assert sum(len(units) for rank in fillers(shares) for units in rank) == 3


def test_a_unit_over_the_budget_is_alone():
    shares = plan([500, 10, 10], ranks=1, budget=100)
    assert [0] in shares[0]


def test_an_empty_batch_is_refused():
    with pytest.raises(ValueError, match="nothing to dispatch"):
        plan([], 1, 10)


def test_a_lone_long_unit_is_computed_once():
    assert plan([3000], ranks=1, budget=1000) == [[[0]]]
    assert plan([3000, 2000], ranks=1, budget=1000) == [[[0], [1]]]
