"""Attention over packed rows: the linear layers see flat tokens, attention sees one sequence at a time.

transformers' own packed path compares every token with every other of the row (quadratic in the pack) and, with
``use_cache`` at its default, lets sequences see each other without a warning. Here the lengths are given explicitly::

    use_packed_attention(model)
    with packed(lens):                                   # sums to N
        model(input_ids=ids_N[None], position_ids=position_N[None], use_cache=False)

The name is registered with ``AttentionInterface`` and has no mask function, so transformers builds no mask at all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AttentionInterface, PreTrainedModel

from rlhf.errors import ModelError
from rlhf.modeling.matmul_attention import LONGEST, Bucket, buckets, matmul_attention

NAME = "rlhf_packed"

Route = Callable[..., tuple[Tensor, Tensor | None]]
"""``route(module, q, k, v, mask, scaling=..., dropout=..., sliding_window=..., **others)``, as transformers calls an
attention function: q [1, H, N, D], k and v [1, K, N, D]; returns ([1, N, H, D], None)."""

_route: ContextVar[Route | None] = ContextVar("rlhf_attention_route", default=None)


@contextmanager
def attend_with(route: Route) -> Iterator[None]:
    """Every attention layer of a model under :func:`use_packed_attention` calls ``route`` inside this context."""
    token = _route.set(route)
    try:
        yield
    finally:
        _route.reset(token)


@contextmanager
def packed(lens: Sequence[int]) -> Iterator[None]:
    """Inside, the model's single row holds sequences of these lengths, each causal and alone."""
    with attend_with(PackedAttention(lens)):
        yield


def attention_route() -> Route | None:
    """The route of the enclosing context; None outside of any."""
    return _route.get()


def current_route() -> Route:
    """:func:`attention_route`, which must be there."""
    route = _route.get()
    if route is None:
        raise ModelError(
            "the model uses packed attention but no lengths are given: call it inside "
            "rlhf.modeling.attention.packed(lens)"
        )
    return route


def use_packed_attention(model: PreTrainedModel) -> None:
    """Make every attention layer of ``model`` take its route from the enclosing context."""
    AttentionInterface.register(NAME, _attention)
    try:
        model.set_attn_implementation(NAME)
    except ValueError as cause:
        raise ModelError(
            f"{type(model).__name__} does not take an attention function through transformers' AttentionInterface, "
            "which packing needs. Use a model whose class supports attention backends."
        ) from cause


def _attention(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **options: Any) -> Any:
    return current_route()(module, q, k, v, mask, **options)


@dataclass(frozen=True, slots=True)
class _Options:
    scaling: float
    dropout: float
    window: int | None
    softcap: float | None


class PackedAttention:
    """The attention of one packed row: each sequence causal and alone.

    On a CPU short sequences go through :mod:`rlhf.modeling.matmul_attention`; others take one
    ``scaled_dot_product_attention`` per run of sequences of equal length, under bf16 in fp32 (the backward of the bf16
    kernel is several times slower there). In fp32 on a CPU the result is bit-equal to one sequence at a time;
    gradients of weights differ by the order of summation.
    """

    def __init__(self, lens: Sequence[int]) -> None:
        self.lens = list(lens)
        self.tokens = sum(lens)
        self._plans: dict[int, tuple[list[Bucket], list[tuple[int, int, int]]]] = {}
        self._masks: dict[tuple[int, int], Tensor] = {}

    def __call__(
        self,
        module: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        scaling: float | None = None,
        dropout: float = 0.0,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        is_causal: bool | None = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        self._check(module, q, k, mask, s_aux, is_causal)
        on_cpu, dtype = q.device.type == "cpu", v.dtype
        if torch.is_autocast_enabled(q.device.type):
            dtype = torch.get_autocast_dtype(q.device.type)
        options = _Options(scaling if scaling is not None else q.shape[-1] ** -0.5, dropout, sliding_window, softcap)
        short = LONGEST.get(dtype, 0) if on_cpu and not dropout and softcap is None and k.shape == v.shape else 0
        with torch.autocast(q.device.type, enabled=False):
            where, runs = self._plan(short)
            parts: list[Tensor] = []
            if where:
                flat_q, flat_k, flat_v = (x[0].transpose(0, 1).to(dtype) for x in (q, k, v))
                out_NHD = matmul_attention(flat_q, flat_k, flat_v, where, options.scaling, sliding_window)
                if not runs:
                    return out_NHD[None], None
                parts.append(out_NHD)
            inner = torch.float32 if on_cpu else dtype
            qi, ki, vi = (x.to(inner) for x in (q, k, v))
            for start, length, count in runs:
                rows = slice(start, start + length * count)
                run_q, run_k, run_v = (_rows(x, rows, count, length) for x in (qi, ki, vi))
                out = self._run(run_q, run_k, run_v, options)
                parts.append(out.transpose(1, 2).reshape(length * count, q.shape[1], v.shape[-1]).to(dtype))
            return self._join(parts, bool(where), runs)[None], None

    def _check(self, module: Any, q: Tensor, k: Tensor, mask: Any, s_aux: Any, is_causal: bool | None) -> None:
        causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
        if mask is not None or s_aux is not None or not causal:
            what = "a mask" if mask is not None else "attention sinks" if s_aux is not None else "no causal order"
            raise ModelError(f"{type(module).__name__} asks for {what}, which packed attention does not have")
        if q.shape[0] != 1 or q.shape[2] != self.tokens or k.shape[2] != self.tokens:
            raise ModelError(
                f"packed attention is set up for one row of {self.tokens} tokens but got queries {tuple(q.shape)} and "
                f"keys {tuple(k.shape)} [batch, heads, tokens, head size]"
            )

    def _plan(self, short: int) -> tuple[list[Bucket], list[tuple[int, int, int]]]:
        """(buckets of sequences up to ``short``, runs (first token, length, count) of the others)."""
        if short not in self._plans:
            starts = [0, *accumulate(self.lens)][:-1]
            pairs = list(zip(starts, self.lens, strict=True))
            small = [(s, n) for s, n in pairs if n <= short]
            runs: list[tuple[int, int, int]] = []
            for start, length in pairs:
                if length <= short:
                    continue
                if runs and runs[-1][1] == length and runs[-1][0] + length * runs[-1][2] == start:
                    runs[-1] = (runs[-1][0], length, runs[-1][2] + 1)
                else:
                    runs.append((start, length, 1))
            self._plans[short] = buckets([s for s, _ in small], [n for _, n in small]), runs
        return self._plans[short]

    def _join(self, parts: list[Tensor], short: bool, runs: list[tuple[int, int, int]]) -> Tensor:
        """Runs take their rows of the first part, which has rows for all tokens where there were short sequences."""
        if not short:
            return parts[0] if len(parts) == 1 else torch.cat(parts)
        pieces, end = [], 0
        for (start, length, count), part in zip(runs, parts[1:], strict=True):
            pieces += [parts[0][end:start], part]
            end = start + length * count
        return torch.cat([*pieces, parts[0][end:]])

    def _run(self, q: Tensor, k: Tensor, v: Tensor, options: _Options) -> Tensor:
        """[count, heads, T, D] of sequences of one length."""
        length = q.shape[2]
        window = options.window if options.window is not None and options.window < length else None
        if options.softcap is not None:
            return self._softcapped(q, k, v, options, window)
        return F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=None if window is None else self._band(length, window, q.device),
            is_causal=window is None,
            dropout_p=options.dropout,
            scale=options.scaling,
            enable_gqa=q.shape[1] != k.shape[1],
        )

    def _softcapped(self, q: Tensor, k: Tensor, v: Tensor, options: _Options, window: int | None) -> Tensor:
        """``softcap * tanh(scores / softcap)`` before the softmax (Gemma 2), which sdpa cannot express."""
        length, groups, cap = q.shape[2], q.shape[1] // k.shape[1], options.softcap
        assert cap is not None
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        scores = cap * torch.tanh(q @ k.transpose(2, 3) * (options.scaling / cap))
        scores = scores.masked_fill(~self._band(length, window or length, q.device), float("-inf"))
        return F.dropout(scores.softmax(-1), options.dropout) @ v

    def _band(self, length: int, window: int, device: torch.device) -> Tensor:
        """bool [T, T]: token i sees j where i - window < j <= i."""
        if (length, window) not in self._masks:
            i = torch.arange(length, device=device)
            distance = i[:, None] - i[None, :]
            self._masks[length, window] = (distance >= 0) & (distance < window)
        return self._masks[length, window]


def _rows(x: Tensor, rows: slice, count: int, length: int) -> Tensor:
    """[1, H, N, D] -> [count, H, length, D] without a copy where the layer laid heads out last."""
    return x[0, :, rows].transpose(0, 1).unflatten(0, (count, length)).transpose(1, 2)
