"""Weights by hand: LD-DPO's for the surplus of the longer answer, and WPO's for pairs."""

from __future__ import annotations

import math

import pytest
import torch
from rlhf_plugin_dpo.weighting import LOG_SUM_SQUARES, pair_weights, tail_weights


def test_only_the_surplus_of_the_longer_answer_counts_less():
    # answers of 3 and 1 tokens, of 2 and 2, of 0 and 2
    answer_A = torch.tensor([0, 0, 0, 1, 2, 2, 3, 3, 5, 5])
    assert tail_weights(answer_A, 6, 0.25).tolist() == [1, 0.25, 0.25, 1, 1, 1, 1, 1, 0.25, 0.25]


def test_contexts_of_one_answer_may_lie_apart():
    answer_A = torch.tensor([0, 0, 1, 1, 0])
    assert tail_weights(answer_A, 2, 0.0).tolist() == [1, 1, 1, 1, 0]


def test_the_sum_of_squares():
    logits = torch.tensor([[0.0, 0.0], [math.log(3), 0.0], [1e4, -1e4]])
    result = LOG_SUM_SQUARES.fn(logits, torch.zeros(3, dtype=torch.long), {}, {})
    assert result.tolist() == pytest.approx([math.log(0.5), math.log(9 / 16 + 1 / 16), 0.0], abs=1e-6)


def test_the_weight_of_a_pair_is_the_product_over_its_answers():
    weights = pair_weights(torch.tensor([math.log(0.5)], requires_grad=True), torch.tensor([math.log(0.1)]))
    assert weights.tolist() == pytest.approx([0.05])
    assert not weights.requires_grad
