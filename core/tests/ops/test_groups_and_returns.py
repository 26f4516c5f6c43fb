"""Group statistics and returns: numbers by hand, plain loops, and properties."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from rlhf.ops.groups import group_center, group_mean, group_std, leave_one_out, one_per_group
from rlhf.ops.returns import gae, return_to_go

R = torch.tensor([1.0, 10.0, 2.0, 20.0, 6.0], dtype=torch.float64)
GROUP = torch.tensor([9, 4, 9, 4, 9])


def test_groups_by_hand():
    assert group_mean(R, GROUP).tolist() == [3.0, 15.0, 3.0, 15.0, 3.0]
    assert group_center(R, GROUP).tolist() == [-2.0, -5.0, -1.0, 5.0, 3.0]
    assert leave_one_out(R, GROUP).tolist() == pytest.approx([1 - 4, 10 - 20, 2 - 3.5, 20 - 10, 6 - 1.5])
    assert group_std(R, GROUP).tolist() == pytest.approx([7**0.5, 50**0.5, 7**0.5, 50**0.5, 7**0.5])
    assert one_per_group(group_mean(R, GROUP), GROUP).tolist() == [15.0, 3.0]


def test_a_group_of_one_has_zero_advantage():
    r_N, group_N = torch.tensor([5.0, 1.0, 2.0]).double(), torch.tensor([0, 1, 1])
    assert leave_one_out(r_N, group_N)[0] == 0
    assert group_center(r_N, group_N)[0] == 0
    assert group_std(r_N, group_N)[0] == 0


@settings(max_examples=60, deadline=None)
@given(st.floats(-1e6, 1e6), st.integers(2, 9))
def test_equal_rewards_are_exactly_zero(value, n):
    """A mean computed as sum / n leaves 1e-17, which a division by std + 1e-9 would still show."""
    r_N, group_N = torch.full((n,), value, dtype=torch.float64), torch.zeros(n, dtype=torch.int64)
    for statistic in (group_center, leave_one_out, group_std):
        assert statistic(r_N, group_N).tolist() == [0.0] * n


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.floats(-100, 100), st.integers(0, 3)), min_size=1, max_size=12), st.randoms())
def test_order_does_not_matter(samples, random):
    order = list(range(len(samples)))
    random.shuffle(order)
    r_N = torch.tensor([r for r, _ in samples], dtype=torch.float64)
    group_N = torch.tensor([g for _, g in samples])
    for statistic in (group_mean, group_center, leave_one_out, group_std):
        a, b = statistic(r_N, group_N)[order], statistic(r_N[order], group_N[order])
        assert torch.allclose(a, b, atol=1e-9)


def test_return_to_go_by_hand_and_over_gaps():
    R_NA = torch.tensor([[1.0, 2.0, 4.0, 0.0], [0.0, 0.0, 8.0, float("nan")]])
    mask = torch.tensor([[True, True, True, False], [True, True, True, False]])
    assert return_to_go(R_NA, mask, 1.0).tolist() == [[7.0, 6.0, 4.0, 0.0], [8.0, 8.0, 8.0, 0.0]]
    assert return_to_go(R_NA, mask, 0.5).tolist() == [[3.0, 4.0, 4.0, 0.0], [2.0, 4.0, 8.0, 0.0]]
    gap = torch.tensor([[1.0, float("inf"), 2.0]])
    gap_mask = torch.tensor([[True, False, True]])
    assert return_to_go(gap, gap_mask, 0.5).tolist() == [[2.0, 0.0, 2.0]]


def test_gae_by_hand():
    """gamma 0.5, lambda 0.5, R = 0, 1; V = 1, 2: delta_2 = 1 - 2 = -1, delta_1 = 1 - 1 = 0, A = (-0.25, -1)."""
    R_NA, V, mask = torch.tensor([[0.0, 1.0]]), torch.tensor([[1.0, 2.0]]), torch.tensor([[True, True]])
    advantages, returns = gae(R_NA, V, mask, None, 0.5, 0.5)
    assert advantages.tolist() == [[-0.25, -1.0]]
    assert returns.tolist() == [[0.75, 1.0]]
    boot, _ = gae(R_NA, V, mask, torch.tensor([4.0]), 0.5, 0.5)  # delta_2 = 1 + 2 - 2 = 1
    assert boot.tolist() == [[0.25, 1.0]]


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 7), st.floats(0, 1), st.floats(0, 1), st.randoms(use_true_random=False))
def test_gae_ignores_environment_tokens(n, gamma, lam, random):
    """The recursion counted environment tokens, which decayed and discounted."""
    values = [[random.uniform(-2, 2) for _ in range(n)] for _ in range(2)]
    places = sorted(random.sample(range(2 * n), n))
    dense = [torch.tensor([v]) for v in values]
    wide = [torch.full((1, 2 * n), float("nan")) for _ in values]
    mask = torch.zeros(1, 2 * n, dtype=torch.bool)
    mask[0, places] = True
    for w, d in zip(wide, dense, strict=True):
        w[0, places] = d[0]
    expected = gae(dense[0], dense[1], torch.ones(1, n, dtype=torch.bool), None, gamma, lam)
    result = gae(wide[0], wide[1], mask, None, gamma, lam)
    for e, g in zip(expected, result, strict=True):
        assert torch.equal(g[0, places], e[0])
        assert torch.all(g[~mask] == 0)


def test_lambda_one_is_return_minus_value():
    g = torch.Generator().manual_seed(0)
    R_NA, V = torch.randn(3, 5, generator=g), torch.randn(3, 5, generator=g)
    mask = torch.ones(3, 5, dtype=torch.bool)
    advantages, returns = gae(R_NA, V, mask, None, 0.9, 1.0)
    assert torch.allclose(returns, return_to_go(R_NA, mask, 0.9), atol=1e-5)
    assert torch.allclose(advantages, returns - V, atol=1e-5)


def test_an_answer_without_tokens_gives_zeros():
    empty = torch.zeros(2, 0)
    assert return_to_go(empty, empty.bool(), 0.9).shape == (2, 0)
    advantages, _ = gae(torch.ones(1, 2), torch.ones(1, 2), torch.zeros(1, 2, dtype=torch.bool), None, 1.0, 1.0)
    assert advantages.tolist() == [[0.0, 0.0]]
