"""How far a canary's log-probs are apart: the mean of its tokens, and the median if a side computes in bf16."""

from __future__ import annotations

import math

import pytest
import torch
from rlhf_runtime.models.weight_sync import Canary, canary_differences


@pytest.mark.parametrize(
    ("apart", "bf16", "value"),
    [
        ([4.0, 0.0, 0.5, 0.1, 0.4], False, 1.0),
        ([4.0, 0.0, 0.5, 0.1, 0.4], True, 0.4),
        ([math.inf, 0.0, 0.0, 0.0, 0.0], True, math.nan),
        ([math.nan, 0.0, 0.0, 0.0, 0.0], True, math.nan),
    ],
)
def test_rounding_of_single_tokens_counts_in_fp32_only_and_what_is_not_finite_always(apart, bf16, value):
    canaries = [Canary([3, 4]), Canary([0, 1, 2, 3, 4, 5])]
    ours_N = torch.arange(8.0)  # 0 and 1, then 2 to 7; a canary's first token has no log-prob
    right, other = [1.0], [3.0 + apart[0], *(float(4 + i) - x for i, x in enumerate(apart[1:]))]
    engines = [[right, [3.0, 4.0, 5.0, 6.0, 7.0]], [right, other]]
    assert canary_differences(canaries, ours_N, engines, bf16) == pytest.approx([0.0, value], nan_ok=True)
