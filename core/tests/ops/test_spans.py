"""Index tensors of pieces, compared with torch's own functions."""

from __future__ import annotations

import pytest
import torch
from rlhf.ops.spans import empty, owners, spans


@pytest.mark.parametrize("counts", [[], [1], [4], [2, 1, 3], [1, 1, 1, 1]])
def test_against_repeat_interleave_and_ranges(counts):
    counts_P = torch.tensor(counts, dtype=torch.int64)
    assert torch.equal(owners(counts_P), torch.repeat_interleave(torch.arange(len(counts)), counts_P))
    starts = [7 * n % 5 for n in range(len(counts))]
    want = [start + n for start, count in zip(starts, counts, strict=True) for n in range(count)]
    result = spans(torch.tensor(starts, dtype=torch.int64), counts_P)
    assert result.tolist() == want
    assert result.dtype == torch.int64


def test_by_hand():
    assert owners(torch.tensor([2, 1, 3])).tolist() == [0, 0, 1, 2, 2, 2]
    assert spans(torch.tensor([10, 0, 5]), torch.tensor([2, 1, 3])).tolist() == [10, 11, 0, 5, 6, 7]


@pytest.mark.parametrize("shape", [(0,), (5,), (3, 2), (0, 2), (2**21 + 1, 2)])
def test_empty_is_memory_of_any_shape_and_dtype(shape):
    for dtype in (torch.bool, torch.int64, torch.float32, torch.bfloat16):
        result, want = empty(shape, dtype), torch.zeros(shape, dtype=dtype)
        result.zero_()
        assert (result.dtype, result.stride()) == (dtype, want.stride())
        assert torch.equal(result, want)
