"""How far canaries' log-probs are apart: the mean of each, and the median of all if a side computes in bf16."""

from __future__ import annotations

import math

import pytest
import torch
from rlhf_runtime.models.weight_sync import Canary, canary_differences


@pytest.mark.parametrize(
    ("differences", "bf16", "values"),
    [
        ([4.0, 0.0, 0.5, 0.1, 0.4], False, [0.0, 1.0]),
        ([4.0, 0.0, 0.5, 0.1, 0.4], True, [0.1, 0.1]),  # the lower one of the two in the middle of six tokens
        ([math.inf, 0.0, 0.0, 0.0, 0.0], False, [0.0, math.nan]),
        ([math.nan, 0.0, 0.0, 0.0, 0.0], True, [math.nan, math.nan]),
    ],
)
def test_rounding_of_single_tokens_counts_in_fp32_only_and_what_is_not_finite_always(differences, bf16, values):
    canaries = [Canary([3, 4]), Canary([0, 1, 2, 3, 4, 5])]
    ours_N = torch.arange(8.0)  # 0 and 1, then 2 to 7; a canary's first token has no log-prob
    right, other = [1.0], [3.0 + differences[0], *(float(4 + i) - x for i, x in enumerate(differences[1:]))]
    engines = [[right, [3.0, 4.0, 5.0, 6.0, 7.0]], [right, other]]
    assert canary_differences(canaries, ours_N, engines, bf16) == pytest.approx(values, nan_ok=True)


def test_a_canary_with_an_image_is_compared_by_itself_in_bf16():
    canaries = [Canary([3, 4]), Canary([0, 1], ("an image",)), Canary([3, 4])]
    engines = [[[1.0], [5.0], [5.5]]]
    assert canary_differences(canaries, torch.arange(6.0), engines, True) == [0.0, 2.0, 0.0]
