"""Attention of short sequences on a CPU: batched matrix products over length buckets, with their own backward pass.

torch's fused CPU kernel is built for long sequences; for 70 tokens this module takes half the time. A sequence's padded
length depends on its own length only, so its result does not depend on the other sequences of the pack. A sequence with
a shared prefix (:mod:`rlhf_modeling.shared_prefixes`) has query rows for its own tokens only.

Shape suffixes: N tokens (those of ``q``, ``k``, ``v``), G sequences of a bucket, P padded length, Q <= P query rows, H
query heads, K key heads, R = H / K, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rlhf_modeling.shared_prefixes import Stretch, take_rows

LONGEST = {torch.float32: 160, torch.bfloat16: 512}
"""Beyond this many tokens the fused kernel is faster (measured: 2 cores, head size 32)."""
STEP = 8
"""Query rows of a sequence start at a multiple of this, so that prefixes of similar length share a bucket."""


def padded(length: int) -> int:
    """The next multiple of 8; from 128 on, of 16."""
    step = 8 if length <= 128 else 16
    return -(-length // step) * step


@dataclass(frozen=True, slots=True)
class LengthBucket:
    """Sequences of one padded length whose query rows start at the same position."""

    first: int
    """Position of the first query row: P = first + Q."""
    keys_GP: Tensor
    """int64: index, among the N tokens, of the token at each position; padding repeats the sequence's last token."""
    own_GQ: Tensor | None
    """bool: neither padding nor a token of the prefix. None if all rows belong to the sequences' own tokens."""

    @property
    def rows_GQ(self) -> Tensor:
        return self.keys_GP[:, self.first :]


@dataclass(frozen=True, slots=True)
class Buckets:
    """All short sequences of a packed row."""

    buckets: tuple[LengthBucket, ...]
    row_N: Tensor | None
    """int64: the query row of each token, with all buckets concatenated; None: the rows are in order."""
    elsewhere_N: Tensor | None
    """bool: tokens of sequences outside of these buckets; None if there are none."""
    shared: bool
    """Some tokens are the keys of several sequences."""


def lay_out(stretches: Sequence[Stretch], tokens: int, place: Tensor | None = None) -> Buckets:
    """Buckets of these sequences of a row of ``tokens`` computed tokens.

    Args:
        place: int64, the index of each token of all sequences in the row; a sequence's tokens start at
            ``Stretch.first``. None: the tokens are in order.
    """
    groups: dict[tuple[int, int], list[Stretch]] = {}
    for s in stretches:
        groups.setdefault((padded(s.length), s.skip // STEP * STEP), []).append(s)
    buckets, rows = [], 0
    row_N = torch.full((tokens,), -1)
    for (size, first), members in sorted(groups.items()):
        at_G1, length_G1, skip_G1 = (
            torch.tensor([getattr(s, name) for s in members])[:, None] for name in ("first", "length", "skip")
        )
        position_P = torch.arange(size)
        keys_GP = at_G1 + torch.minimum(position_P, length_G1 - 1)
        if place is not None:
            keys_GP = place[keys_GP]
        own_GQ = ((position_P >= skip_G1) & (position_P < length_G1))[:, first:]
        bucket = LengthBucket(first, keys_GP, None if bool(own_GQ.all()) else own_GQ)
        number_GQ = torch.arange(rows, rows + own_GQ.numel()).view_as(own_GQ)
        row_N[bucket.rows_GQ[own_GQ]] = number_GQ[own_GQ]
        rows += own_GQ.numel()
        buckets.append(bucket)
    elsewhere_N = row_N < 0
    # Any valid row: the caller replaces the results of these tokens.
    row_N[elsewhere_N] = 0
    in_order = rows == tokens and bool((row_N == torch.arange(tokens)).all())
    shared = any(s.skip for s in stretches)
    return Buckets(
        tuple(buckets), None if in_order else row_N, elsewhere_N if bool(elsewhere_N.any()) else None, shared
    )


def matmul_attention(
    q_NHD: Tensor, k_NKD: Tensor, v_NKD: Tensor, layout: Buckets, scaling: float, window: int | None
) -> Tensor:
    """[N, H, D] -> [N, H, D] at the tokens of ``layout``, undefined elsewhere; all inputs of one dtype.

    Scores and softmax are fp32 beyond the matrix products, whose results are rounded to the inputs' dtype.
    """
    return _MatmulAttention.apply(q_NHD, k_NKD, v_NKD, layout, scaling, window)


class _MatmulAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q_NHD: Tensor, k_NKD: Tensor, v_NKD: Tensor, layout: Buckets, scaling: float, window: int | None
    ) -> Tensor:
        key_heads = k_NKD.shape[1]
        outputs = _QueryRows(layout, q_NHD)
        saved: list[Tensor] = []
        for bucket in layout.buckets:
            q = _gather(q_NHD, bucket.rows_GQ, key_heads)
            k, v = (_gather(x, bucket.keys_GP, key_heads) for x in (k_NKD, v_NKD))
            exact = q.dtype == torch.float32
            # In bf16 a scaled q would be rounded a second time, so the fp32 scores are scaled instead.
            if exact:
                q.mul_(scaling)
            scores = torch.bmm(q, k.transpose(1, 2)).float()
            if not exact:
                scores.mul_(scaling)
            bias_QP = _bias(bucket.keys_GP.shape[1], window)[bucket.first :]
            scores.view(-1, *bias_QP.shape).add_(bias_QP)
            p = torch.softmax(scores, -1).to(q.dtype)
            outputs.add(bucket, torch.bmm(p, v), key_heads)
            saved += [q, k, v, p]
        ctx.save_for_backward(*saved)
        ctx.layout, ctx.scaling, ctx.key_heads = layout, scaling, key_heads
        return outputs.by_token()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_NHD: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # read once: under gradient checkpointing each access recomputes the layer
        layout, key_heads = ctx.layout, ctx.key_heads
        tokens, _, size = grad_NHD.shape
        dtype = torch.float32 if layout.shared else grad_NHD.dtype  # a key's gradients are added without rounding
        dk_NKD, dv_NKD = (grad_NHD.new_zeros((tokens, key_heads, size), dtype=dtype) for _ in "kv")
        queries = _QueryRows(layout, grad_NHD)
        for i, bucket in enumerate(layout.buckets):
            q, k, v, p = saved[4 * i : 4 * i + 4]
            do = _gather(grad_NHD, bucket.rows_GQ, key_heads, bucket.own_GQ)
            _add(dv_NKD, torch.bmm(p.transpose(1, 2), do), bucket)
            dp = torch.bmm(do, v.transpose(1, 2)).float()
            ds = torch.ops.aten._softmax_backward_data(dp, p.float(), -1, torch.float32)
            if q.dtype == torch.float32:  # q is already scaled
                _add(dk_NKD, torch.bmm(ds.transpose(1, 2), q), bucket)
                queries.add(bucket, torch.bmm(ds, k).mul_(ctx.scaling), key_heads)
            else:
                ds = ds.mul_(ctx.scaling).to(q.dtype)
                _add(dk_NKD, torch.bmm(ds.transpose(1, 2), q), bucket)
                queries.add(bucket, torch.bmm(ds, k), key_heads)
        dq_NHD = queries.by_token()
        # Another kernel computes the gradient of these tokens, and autograd adds the two.
        if layout.elsewhere_N is not None:
            dq_NHD.masked_fill_(layout.elsewhere_N[:, None, None], 0.0)
        return dq_NHD, dk_NKD.to(grad_NHD.dtype), dv_NKD.to(grad_NHD.dtype), None, None, None


def _gather(x_NHD: Tensor, index_GL: Tensor, key_heads: int, own_GL: Tensor | None = None) -> Tensor:
    """[N, H, D] -> [G K, R L, D]: the query heads that share a key head become additional rows of its product.

    Rows outside of ``own_GL`` are zero.
    """
    _, heads, size = x_NHD.shape
    count, length = index_GL.shape
    rows = take_rows(x_NHD, index_GL.reshape(-1)).view(count, length, key_heads, heads // key_heads, size)
    if own_GL is not None:
        rows.masked_fill_(~own_GL[:, :, None, None, None], 0.0)
    return rows.permute(0, 2, 3, 1, 4).reshape(count * key_heads, heads // key_heads * length, size)


def _add(sum_NKD: Tensor, x: Tensor, bucket: LengthBucket) -> None:
    """Add [G K, P, D] to the tokens of its keys. Values at padding are exactly zero."""
    count, length = bucket.keys_GP.shape
    x = x.view(count, -1, length, x.shape[-1]).transpose(1, 2).to(sum_NKD.dtype).reshape(count * length, -1)
    sum_NKD.view(len(sum_NKD), -1).index_add_(0, bucket.keys_GP.view(-1), x)


class _QueryRows:
    """Collects results at all query rows, bucket after bucket, then returns them by token."""

    def __init__(self, layout: Buckets, like_NHD: Tensor) -> None:
        self.layout, self.end = layout, 0
        rows = sum(bucket.rows_GQ.numel() for bucket in layout.buckets)
        self.rows = like_NHD.new_empty((rows, *like_NHD.shape[1:]))

    def add(self, bucket: LengthBucket, x: Tensor, key_heads: int) -> None:
        """``x`` [G K, R Q, D], the inverse of :func:`_gather`."""
        count, length = bucket.rows_GQ.shape
        heads, size = self.rows.shape[1:]
        split = (count, key_heads, heads // key_heads, length, size)
        part = self.rows[self.end : self.end + count * length]
        part.view(count, length, key_heads, heads // key_heads, size).copy_(x.view(split).permute(0, 3, 1, 2, 4))
        self.end += count * length

    def by_token(self) -> Tensor:
        """[N, H, D]; undefined at tokens of other sequences."""
        return self.rows if self.layout.row_N is None else take_rows(self.rows, self.layout.row_N)


_biases: dict[tuple[int, int | None], Tensor] = {}


def _bias(length: int, window: int | None) -> Tensor:
    """fp32 [P, P]: 0 where token i sees j (i - window < j <= i), else -inf."""
    key = (length, window if window is not None and window < length else None)
    if key not in _biases:
        i = torch.arange(length)
        distance = i[:, None] - i[None, :]
        visible = (distance >= 0) & (distance < (key[1] or length))
        _biases[key] = torch.zeros(length, length).masked_fill_(~visible, float("-inf"))
    return _biases[key]
