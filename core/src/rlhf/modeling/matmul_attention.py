"""Attention of short sequences on a CPU: batched matrix products over length buckets, with a backward of their own.

torch's fused CPU kernel is built for long sequences: for 70 tokens this takes two thirds of its time in fp32, and a
third under bf16, whose fused backward is slow. A sequence's padded length depends on nothing but its own length, so its
result does not depend on what it is packed with.

Shape suffixes: N packed tokens, G sequences of a bucket, P padded length, H query heads, K key heads, R = H / K, D head
size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

LONGEST = {torch.float32: 160, torch.bfloat16: 512}
"""Beyond this many tokens the fused kernel is faster (measured: 2 cores, head size 32)."""


def padded(length: int) -> int:
    """The next multiple of 8, of 16 from 128 on."""
    step = 8 if length <= 128 else 16
    return -(-length // step) * step


@dataclass(frozen=True, slots=True)
class Bucket:
    """Sequences of one padded length."""

    length: int
    """P."""
    rows_GP: Tensor
    """int64: the packed token in each place; padding repeats the sequence's last token."""
    valid_GP: Tensor
    """bool: not padding."""
    full: bool
    """No padding at all."""


def buckets(starts: Sequence[int], lens: Sequence[int]) -> list[Bucket]:
    by_length: dict[int, list[tuple[int, int]]] = {}
    for start, length in zip(starts, lens, strict=True):
        by_length.setdefault(padded(length), []).append((start, length))
    found = []
    for size, members in sorted(by_length.items()):
        start_G1 = torch.tensor([m[0] for m in members])[:, None]
        length_G1 = torch.tensor([m[1] for m in members])[:, None]
        place_P = torch.arange(size)
        valid_GP = place_P < length_G1
        found.append(Bucket(size, start_G1 + torch.minimum(place_P, length_G1 - 1), valid_GP, bool(valid_GP.all())))
    return found


def matmul_attention(
    q_NHD: Tensor, k_NKD: Tensor, v_NKD: Tensor, where: Sequence[Bucket], scaling: float, window: int | None
) -> Tensor:
    """[N, H, D] -> [N, H, D] at the tokens of ``where``, undefined elsewhere; all inputs of one dtype.

    Scores and softmax are fp32 beyond the matrix products, whose results are rounded to the inputs' dtype.
    """
    return _MatmulAttention.apply(q_NHD, k_NKD, v_NKD, where, scaling, window)


class _MatmulAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_NHD: Tensor,
        k_NKD: Tensor,
        v_NKD: Tensor,
        where: Sequence[Bucket],
        scaling: float,
        window: int | None,
    ) -> Tensor:
        key_heads = k_NKD.shape[1]
        out_NHD = torch.empty_like(q_NHD, memory_format=torch.contiguous_format)
        saved: list[Tensor] = []
        for bucket in where:
            size = bucket.length
            q, k, v = (_gather(x, bucket, key_heads) for x in (q_NHD, k_NKD, v_NKD))
            scores = torch.bmm(q, k.transpose(1, 2)).float().mul_(scaling)
            scores.view(-1, size, size).add_(_bias(size, window))
            p = torch.softmax(scores, -1).to(q.dtype)
            o = torch.bmm(p, v)
            _scatter(out_NHD, o, bucket)
            saved += [q, k, v, p, o]
        ctx.save_for_backward(*saved)
        ctx.where, ctx.scaling, ctx.key_heads = where, scaling, key_heads
        return out_NHD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_NHD: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # once: under gradient checkpointing each access would compute the layer again
        tokens, heads, size = grad_NHD.shape
        covered = sum(int(bucket.valid_GP.sum()) for bucket in ctx.where) == tokens
        new = grad_NHD.new_empty if covered else grad_NHD.new_zeros  # other tokens' attention is computed elsewhere
        dq_NHD, dk_NKD, dv_NKD = (new(tokens, count, size) for count in (heads, ctx.key_heads, ctx.key_heads))
        for i, bucket in enumerate(ctx.where):
            q, k, v, p, o = saved[5 * i : 5 * i + 5]
            do = _gather(grad_NHD, bucket, ctx.key_heads, zero_padding=True)
            _scatter(dv_NKD, torch.bmm(p.transpose(1, 2), do), bucket)
            ds = torch.bmm(do, v.transpose(1, 2)).float()
            delta = (do * o).sum(-1, keepdim=True, dtype=torch.float32)
            ds = ds.sub_(delta).mul_(p).mul_(ctx.scaling).to(p.dtype)
            _scatter(dq_NHD, torch.bmm(ds, k), bucket)
            _scatter(dk_NKD, torch.bmm(ds.transpose(1, 2), q), bucket)
        return dq_NHD, dk_NKD, dv_NKD, None, None, None


def _gather(x_NHD: Tensor, bucket: Bucket, key_heads: int, zero_padding: bool = False) -> Tensor:
    """[N, H, D] -> [G K, R P, D]: the query heads that share a key head are further rows of its product."""
    _, heads, size = x_NHD.shape
    count, length = bucket.rows_GP.shape
    rows = x_NHD[bucket.rows_GP]  # [G, P, H, D]
    if zero_padding and not bucket.full:
        rows.masked_fill_(~bucket.valid_GP[:, :, None, None], 0.0)
    rows = rows.view(count, length, key_heads, heads // key_heads, size).permute(0, 2, 3, 1, 4)
    return rows.reshape(count * key_heads, heads // key_heads * length, size)


def _scatter(out_NHD: Tensor, x: Tensor, bucket: Bucket) -> None:
    """The inverse of :func:`_gather`, padding left out."""
    _, heads, size = out_NHD.shape
    count, length = bucket.rows_GP.shape
    key_heads = x.shape[0] // count
    x = x.view(count, key_heads, heads // key_heads, length, size).permute(0, 3, 1, 2, 4)
    x = x.reshape(count * length, heads, size)
    if bucket.full:
        out_NHD.index_copy_(0, bucket.rows_GP.reshape(-1), x)
    else:
        out_NHD.index_copy_(0, bucket.rows_GP[bucket.valid_GP], x[bucket.valid_GP.reshape(-1)])


_biases: dict[tuple[int, int | None], Tensor] = {}


def _bias(length: int, window: int | None) -> Tensor:
    """fp32 [P, P]: 0 where token i sees j (i - window < j <= i), else -inf."""
    key = (length, window if window is not None and window < length else None)
    if key not in _biases:
        i = torch.arange(length)
        distance = i[:, None] - i[None, :]
        seen = (distance >= 0) & (distance < (key[1] or length))
        _biases[key] = torch.zeros(length, length).masked_fill_(~seen, float("-inf"))
    return _biases[key]
