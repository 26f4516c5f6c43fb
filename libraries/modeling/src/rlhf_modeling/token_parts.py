"""A packed row whose tokens are divided over ranks (sequence parallel).

Every rank of the group gets the same micro-batch and computes its own part of the row's tokens: embeddings, norms,
feed-forward layers and heads. Only attention reads other tokens. Before it, one exchange gives each rank all tokens of
some heads; after it, a second exchange returns all heads of the rank's own tokens (DeepSpeed-Ulysses, Jacobs et al.
2023, arXiv:2309.14509). So the attention function sees a whole row, with the lengths of its sequences, but fewer heads.

Each rank computes the same loss from the outputs of all tokens (:meth:`RowPart.assemble`). The backward pass selects
the gradients of the rank's own tokens. So a rank's gradients of weights are parts of a sum over the ranks of the group.

Shape suffixes: M computed tokens of the row, P <= M tokens of this rank's part, R ranks, H query heads, K key heads, D
head size, F width of one rank's share of a token's queries, keys and values, A outputs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from rlhf.errors import CapabilityError, ModelError
from torch import Tensor
from torch.autograd.function import once_differentiable

from rlhf_modeling.attention import PackedAttention
from rlhf_modeling.shared_prefixes import Shared


@dataclass(frozen=True)
class TokenGroup:
    """The ranks that divide rows."""

    group: Any
    """Process group of the ranks."""
    rank: int
    """Index of this rank in the group."""
    ranks: int


@dataclass(frozen=True)
class RowPart:
    """This rank's part of one row: adjacent tokens, at least one on every rank."""

    token_group: TokenGroup
    tokens: int
    """M, the number of tokens; at least one per rank."""

    def __post_init__(self) -> None:
        assert self.tokens >= self.token_group.ranks

    @cached_property
    def sizes(self) -> list[int]:
        """[R]: number of tokens of each rank; they differ by at most one."""
        ends = [self.tokens * r // self.token_group.ranks for r in range(self.token_group.ranks + 1)]
        return [end - start for start, end in pairwise(ends)]

    @cached_property
    def start(self) -> int:
        return sum(self.sizes[: self.token_group.rank])

    @property
    def local_tokens(self) -> int:
        """P."""
        return self.sizes[self.token_group.rank]

    def local_rows(self, x_M: Tensor) -> Tensor:
        """The rows of this rank, a view."""
        return x_M[self.start : self.start + self.local_tokens]

    def among_own(self, source_A: Tensor) -> Tensor:
        """int64: indices into ``source_A`` of the rows that are in this part."""
        return ((source_A >= self.start) & (source_A < self.start + self.local_tokens)).nonzero()[:, 0]

    def assemble(self, outputs_A: Tensor, index_A: Tensor, count: int) -> Tensor:
        """[count, ...]: the outputs of all ranks. ``outputs_A`` are this rank's outputs, at the indices ``index_A``;
        each index is on one rank. ``outputs_A`` gets the gradient at the same indices."""
        assembled: Tensor = _Assemble.apply(outputs_A, index_A, count, self.token_group.group)
        return assembled

    def total(self, x: Tensor) -> Tensor:
        """Sum over the ranks. The gradient passes unchanged to each rank's own term."""
        summed: Tensor = _Total.apply(x, self.token_group.group)
        return summed

    # --------------------------------------------------------------------------------------- attention

    def to_heads(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[1, H, P, D] -> [1, H / R, M, D]; the same for keys and values. If R does not divide the number of key heads,
        each key head is repeated for the ranks whose query heads read it. All three have the same dtype."""
        ranks, heads = self.token_group.ranks, q.shape[1]
        repeats = math.lcm(k.shape[1], ranks) // k.shape[1]
        k, v = (x if repeats == 1 else x.repeat_interleave(repeats, 1) for x in (k, v))
        rows = [x[0].unflatten(0, (ranks, -1)).transpose(1, 2).flatten(2) for x in (q, k, v)]
        every_MF = self._exchange(torch.cat(rows, -1).flatten(0, 1), [self.local_tokens] * ranks, self.sizes)
        widths = [x.shape[-1] for x in rows]
        parts = zip(every_MF.split(widths, -1), (heads, k.shape[1], v.shape[1]), strict=True)
        q, k, v = (x.unflatten(-1, (count // ranks, -1)).transpose(0, 1)[None] for x, count in parts)
        return q, k, v

    def to_tokens(self, out: Tensor) -> Tensor:
        """[1, M, H / R, D] -> [1, P, H, D]."""
        ranks, (heads, size) = self.token_group.ranks, out.shape[2:]
        rank_rows = self._exchange(out[0].flatten(1), self.sizes, [self.local_tokens] * ranks)
        return rank_rows.view(ranks, self.local_tokens, heads, size).transpose(0, 1).flatten(1, 2)[None]

    def _exchange(self, x: Tensor, to_ranks: Sequence[int], from_ranks: Sequence[int]) -> Tensor:
        exchanged: Tensor = _Exchange.apply(x, to_ranks, from_ranks, self.token_group.group)
        return exchanged


class PartAttention(PackedAttention):
    """The attention of a row that is divided over ranks: :class:`rlhf_modeling.attention.PackedAttention` of all
    tokens, for this rank's heads."""

    def __init__(self, part: RowPart, lens: Sequence[int], shared: Shared | None = None, kernel: str = "auto") -> None:
        super().__init__(lens, shared, kernel)
        self.part = part

    def __call__(
        self, module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *args: Any, **options: Any
    ) -> tuple[Tensor, None]:
        ranks, tokens = self.part.token_group.ranks, self.part.local_tokens
        if q.shape[1] % ranks:
            raise CapabilityError(heads_refused(type(module).__name__, q.shape[1], ranks))
        if q.shape[0] != 1 or q.shape[2] != tokens or k.shape[2] != tokens:
            raise ModelError(
                f"this rank computes {tokens} tokens of the row but {type(module).__name__} attends with queries "
                f"{tuple(q.shape)} and keys {tuple(k.shape)} [batch, heads, tokens, head size]"
            )
        # on a GPU every kernel computes in this dtype; on a CPU some read fp32 queries and keys under autocast
        on_cpu, dtypes = q.device.type == "cpu", [x.dtype for x in (q, k, v)]
        dtype = torch.promote_types(torch.promote_types(*dtypes[:2]), dtypes[2]) if on_cpu else self.computes(q, v)
        q, k, v = self.part.to_heads(q.to(dtype), k.to(dtype), v.to(dtype))
        if on_cpu:
            q, k, v = (x.to(kind) for x, kind in zip((q, k, v), dtypes, strict=True))
        out, _ = super().__call__(module, q, k, v, mask, *args, **options)
        return self.part.to_tokens(out), None


def heads_refused(name: str, heads: int, ranks: int) -> str:
    allowed = ", ".join(str(n) for n in range(1, heads + 1) if heads % n == 0)
    return (
        f"sequence_parallel = {ranks} does not divide the {heads} attention heads of {name}. Every head is computed on "
        f"one rank. Use a divisor: {allowed}."
    )


# --------------------------------------------------------------------------------------------- collectives


class _Exchange(torch.autograd.Function):
    """All-to-all exchange of rows: sends ``to_ranks[r]`` rows to rank r and receives ``from_ranks[r]`` from it. The
    backward pass sends the gradients back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, to_ranks: Sequence[int], from_ranks: Sequence[int], group: Any) -> Tensor:
        ctx.to_ranks, ctx.from_ranks, ctx.group = to_ranks, from_ranks, group
        return _all_to_all(x, to_ranks, from_ranks, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _all_to_all(grad, ctx.from_ranks, ctx.to_ranks, ctx.group), None, None, None


def _all_to_all(x: Tensor, to_ranks: Sequence[int], from_ranks: Sequence[int], group: Any) -> Tensor:
    out = x.new_empty((sum(from_ranks), *x.shape[1:]))
    dist.all_to_all_single(out, x.contiguous(), list(from_ranks), list(to_ranks), group=group)
    return out


class _Assemble(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, outputs_A: Tensor, index_A: Tensor, count: int, group: Any) -> Tensor:
        ctx.save_for_backward(index_A)
        out = outputs_A.new_zeros((count, *outputs_A.shape[1:]))
        out[index_A] = outputs_A.detach()
        dist.all_reduce(out, group=group)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (index_A,) = ctx.saved_tensors
        return grad[index_A], None, None, None


class _Total(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        out = x.detach().clone()
        dist.all_reduce(out, group=group)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad, None
