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
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AttentionInterface, PreTrainedModel

from rlhf.errors import ModelError

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


def current_route() -> Route:
    """The route of the enclosing context, for a recomputation that runs later (gradient checkpointing)."""
    route = _route.get()
    if route is None:
        raise ModelError(
            "the model uses packed attention but no lengths are given: call it inside rlhf_plugin_local.attention.packed"
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


class PackedAttention:
    """One causal ``scaled_dot_product_attention`` per run of consecutive sequences of equal length.

    Bit-equal to one sequence at a time in fp32 on CPU (gradients differ by the order of summation). Under bf16 on CPU
    q, k and v are computed with in fp32: the backward of the bf16 kernel is several times slower there.
    """

    def __init__(self, lens: Sequence[int]) -> None:
        self.tokens = sum(lens)
        self.runs = [(length, len(list(same))) for length, same in groupby(lens)]
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
        causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
        if mask is not None or s_aux is not None or not causal:
            what = "a mask" if mask is not None else "attention sinks" if s_aux is not None else "no causal order"
            raise ModelError(f"{type(module).__name__} asks for {what}, which packed attention does not have")
        if q.shape[0] != 1 or q.shape[2] != self.tokens or k.shape[2] != self.tokens:
            raise ModelError(
                f"packed attention is set up for one row of {self.tokens} tokens but got queries {tuple(q.shape)} and "
                f"keys {tuple(k.shape)} [batch, heads, tokens, head size]"
            )
        dtype = q.dtype
        if dtype == torch.bfloat16 and q.device.type == "cpu":
            q, k, v = q.float(), k.float(), v.float()
        parts, start = [], 0
        for length, count in self.runs:
            rows = slice(start, start + length * count)
            start = rows.stop
            qr, kr, vr = (_rows(x, rows, count, length) for x in (q, k, v))
            window = sliding_window if sliding_window is not None and sliding_window < length else None
            if softcap is not None:
                out = self._softcapped(qr, kr, vr, scaling, dropout, window, softcap)
            else:
                out = F.scaled_dot_product_attention(
                    qr,
                    kr,
                    vr,
                    attn_mask=None if window is None else self._band(length, window, q.device),
                    is_causal=window is None,
                    dropout_p=dropout,
                    scale=scaling,
                    enable_gqa=q.shape[1] != k.shape[1],
                )
            parts.append(out.transpose(1, 2).reshape(1, length * count, q.shape[1], v.shape[-1]))
        out = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
        return out.to(dtype), None

    def _softcapped(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scaling: float | None,
        dropout: float,
        window: int | None,
        softcap: float,
    ) -> Tensor:
        """``softcap * tanh(scores / softcap)`` before the softmax (Gemma 2), which sdpa cannot express."""
        length, groups = q.shape[2], q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        scores = q @ k.transpose(2, 3) * (scaling if scaling is not None else q.shape[-1] ** -0.5)
        scores = softcap * torch.tanh(scores / softcap)
        scores = scores.masked_fill(~self._band(length, window or length, q.device), float("-inf"))
        return F.dropout(scores.softmax(-1), dropout) @ v

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
