"""The number of positions that a decoding step attends to."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from rlhf_plugin_local.kv_cache import SlotCache
from rlhf_plugin_local.sampling_attention import StepAttention

SLOTS, HEADS, GROUPS, SIZE, CAPACITY = 3, 2, 2, 8, 80


def filled(dtype: torch.dtype) -> SlotCache:
    cache, g = SlotCache(), torch.Generator().manual_seed(0)
    layer = tuple(torch.randn(1, HEADS, SIZE, generator=g).to(dtype) for _ in range(2))
    cache.reserve([layer], SLOTS, CAPACITY, 0)
    for tensor in (cache.keys[0], cache.values[0]):
        tensor.copy_(torch.randn(tensor.shape, generator=g))
    return cache


@pytest.mark.parametrize(
    ("dtype", "length", "positions"),
    [(torch.bfloat16, n, m) for n, m in ((1, 32), (32, 32), (33, 64), (70, 80), (80, 80))] + [(torch.float32, 33, 33)],
)
def test_in_bf16_on_a_cpu_whole_blocks_are_read_and_positions_beyond_a_row_are_masked(dtype, length, positions):
    cache, g = filled(dtype), torch.Generator().manual_seed(1)
    position_S = torch.tensor([length - 1, 0, length // 2])
    step = StepAttention(cache, position_S, length, {})
    assert step.length == positions
    q, k, v = (torch.randn(1, n, SLOTS, SIZE, generator=g).to(dtype) for n in (HEADS * GROUPS, HEADS, HEADS))
    out = step(SimpleNamespace(layer_idx=0, is_causal=True), q, k, v, None)[0]
    for s, last in enumerate(position_S.tolist()):
        keys, values = (x[0][s, :, : last + 1].double() for x in (cache.keys, cache.values))
        assert torch.equal(keys[:, last], k[0, :, s].double())
        for h in range(HEADS * GROUPS):
            weight = (keys[h // GROUPS] @ q[0, h, s].double() * SIZE**-0.5).softmax(0)
            want = weight @ values[h // GROUPS]
            torch.testing.assert_close(
                out[0, s, h].double(), want, atol=2e-2 if dtype == torch.bfloat16 else 1e-5, rtol=0
            )
