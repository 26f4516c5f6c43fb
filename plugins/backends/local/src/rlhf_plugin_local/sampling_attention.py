"""Attention while sampling: packed prompts, then one token per row over the slots of the cache.

Both are routes of :mod:`rlhf_modeling.attention` and see tokens as one row [1, H, tokens, D], so the layers of the
trainer's module, fused or not, run as in training. In a decoding step the row holds one token of every sample.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from rlhf.errors import ModelError
from rlhf_modeling.attention import PackedAttention, current_route
from torch import Tensor

from rlhf_plugin_local.kv_cache import LayerKV, SlotCache

NAME = "rlhf_sampling"
QUERIES = 512
"""Queries per block of prompt attention with windows, soft caps or sinks. It limits the size of the score matrix."""
POSITIONS = 32
"""On a CPU in bf16, a decoding step attends to whole blocks of this many positions; the last positions are masked.
oneDNN keeps compiled code for each shape, so a new shape in every step would fragment the heap."""


def register_attention() -> None:
    """Register the attention of the enclosing context with transformers as :data:`NAME`."""
    from transformers import AttentionInterface

    def attend(module: Any, q: Tensor, k: Tensor, v: Tensor, attention_mask: Tensor | None, **options: Any) -> Any:
        return current_route()(module, q, k, v, attention_mask, **options)  # some models pass the mask by its name

    AttentionInterface.register(NAME, attend)


class PromptAttention(PackedAttention):
    """Each prompt of the packed row attends only to itself. The keys and values of each call of attention are kept, in
    order, [N, H, D] each. Some models call attention twice in a layer, or use a layer several times in a pass, with the
    same index."""

    def __init__(self, lens: list[int], windows: Mapping[Any, int]) -> None:
        super().__init__(lens)
        self.windows = windows
        self.kv: list[LayerKV] = []

    def __call__(  # type: ignore[override]  # is_causal is among the options: transformers gives it by name
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
        **options: Any,
    ) -> tuple[Tensor, None]:
        _check(module, mask, options)
        window = sliding_window or self.windows.get(getattr(module, "layer_idx", None))
        self.kv.append((k[0].transpose(0, 1).to(v.dtype), v[0].transpose(0, 1)))
        if softcap is None and s_aux is None and (window is None or window >= max(self.lens)):
            return super().__call__(module, q, k, v, mask, scaling, is_causal=True)
        scale = q.shape[-1] ** -0.5 if scaling is None else scaling
        sequences = zip(*(x.to(v.dtype).split(self.lens, 2) for x in (q, k, v)), strict=True)
        parts = [_causal_blocks(qs, ks, vs, scale, window, softcap, s_aux) for qs, ks, vs in sequences]
        return torch.cat(parts, 2).transpose(1, 2).contiguous(), None


class StepAttention(PackedAttention):
    """One new token of each of S rows, slot s at ``position_S[s]``. Its key and value are written to the cache, and it
    attends to all positions of its slot up to its own."""

    def __init__(self, cache: SlotCache, position_S: Tensor, length: int, windows: Mapping[Any, int]) -> None:
        """``length``: the largest position of a live row + 1; positions beyond it are never read."""
        self.cache, self.position_S, self.windows = cache, position_S, windows
        self._calls = 0
        self.length = min(-(-length // POSITIONS) * POSITIONS, cache.capacity) if _compiles_shapes(cache) else length
        # Built once per step for all layers of a kind.
        self._index: dict[int, Tensor] = {}
        self._bias: dict[tuple[int | None, int], Tensor] = {}

    def __call__(  # type: ignore[override]  # is_causal is among the options: transformers gives it by name
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
        **options: Any,
    ) -> tuple[Tensor, None]:
        _check(module, mask, options)
        call, heads, S = self._calls, k.shape[1], len(self.position_S)
        self._calls += 1  # calls come in the same order as for the prompt
        window = sliding_window or self.windows.get(getattr(module, "layer_idx", None))
        self.cache.write(call, self._flat(heads), k[0].transpose(0, 1), v[0].transpose(0, 1))
        key, value = (c[call][:S, :, : self.length] for c in (self.cache.keys, self.cache.values))
        scale = q.shape[-1] ** -0.5 if scaling is None else scaling
        query = q[0].transpose(0, 1)[:, :, None].to(key.dtype)
        out_SH1D = _attend(query, key, value, self._hidden(window, heads, key.dtype), scale, softcap, s_aux)
        return out_SH1D[None, :, :, 0].contiguous(), None

    def _flat(self, heads: int) -> Tensor:
        """Index of (row, head, position) in [slots, H, capacity], int64 [S H]."""
        if heads not in self._index:
            S, position_S = len(self.position_S), self.position_S
            first_SH = torch.arange(S * heads, device=position_S.device).view(S, heads) * self.cache.capacity
            self._index[heads] = (first_SH + position_S[:, None]).flatten()
        return self._index[heads]

    def _hidden(self, window: int | None, heads: int, dtype: torch.dtype) -> Tensor:
        """[S heads, 1, length]: 0 where the query of a row attends to the position, else -inf."""
        if (window, heads) not in self._bias:
            position_S1 = self.position_S[:, None]
            at_L = torch.arange(self.length, device=position_S1.device)
            hidden_SL = at_L > position_S1
            if window is not None:
                hidden_SL |= at_L <= position_S1 - window
            bias_SL = torch.zeros(hidden_SL.shape, dtype=dtype, device=hidden_SL.device)
            bias_SL.masked_fill_(hidden_SL, float("-inf"))
            self._bias[window, heads] = bias_SL.repeat_interleave(heads, 0)[:, None]
        return self._bias[window, heads]


def _compiles_shapes(cache: SlotCache) -> bool:
    return cache.keys[0].device.type == "cpu" and cache.keys[0].dtype != torch.float32


def _check(module: Any, mask: Tensor | None, options: Mapping[str, Any]) -> None:
    if mask is not None:
        raise ModelError(
            f"{type(module).__name__} passes its own mask to its attention, which sampling does not support."
        )
    if not getattr(module, "is_causal", True):
        raise ModelError(f"{type(module).__name__} attends to later tokens; sampling needs a causal language model.")
    for name in ("position_bias", "indices", "block_indices"):
        if options.get(name) is not None:
            raise ModelError(
                f"{type(module).__name__} passes {name!r} to its attention, which sampling in process does not "
                "implement. Use another generator (vllm)."
            )


def _attend(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor, scale: float, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    """Attention of [B, H, Q, D] queries over [B, K, L, D] keys, without repeated heads: query head h reads key head ``h
    // (H / K)``. With one query per row this is faster on a CPU than the fused kernel with a mask. Softmax in fp32.

    ``bias``: 0 or -inf, broadcastable to [B K, H / K x Q, L]. ``sinks`` [H]: logits that take part in the softmax but
    add no value.
    """
    B, H, Q, D = query.shape
    K, L = key.shape[1], key.shape[2]
    with torch.autocast(query.device.type, enabled=False):
        q = query.reshape(B * K, H // K * Q, D)
        k = key.reshape(B * K, L, D)
        if softcap is not None:
            score = torch.bmm(q, k.transpose(1, 2)).mul_(scale / softcap).tanh_().mul_(softcap).add_(bias)
        elif q.dtype == torch.float32:
            score = torch.baddbmm(bias, q, k.transpose(1, 2), alpha=scale)
        else:  # k first: as a transposed right factor, a CPU's bf16 product would copy the part of the cache it reads
            score = torch.bmm(k, (q * scale).transpose(1, 2)).transpose(1, 2).add(bias)
        if sinks is None:
            weight = score.softmax(-1, dtype=torch.float32)
        else:
            sink = sinks.float().view(1, K, H // K, 1).expand(B, -1, -1, Q).reshape(B * K, H // K * Q, 1)
            weight = torch.cat([score.float(), sink], -1).softmax(-1)[..., :-1]
        return torch.bmm(weight.to(value.dtype), value.reshape(B * K, L, -1)).view(B, H, Q, -1)


def _causal_blocks(
    q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    """Causal attention of one prompt [1, H, L, D], block of queries by block of queries."""
    out = []
    for start in range(0, q.shape[2], QUERIES):
        stop = min(start + QUERIES, q.shape[2])
        first = 0 if window is None else max(0, start - window + 1)
        query_Q1 = torch.arange(start, stop, device=q.device)[:, None]
        key_L = torch.arange(first, stop, device=q.device)
        hidden_QL = key_L > query_Q1
        if window is not None:
            hidden_QL |= key_L <= query_Q1 - window
        bias_QL = torch.zeros(hidden_QL.shape, dtype=q.dtype, device=q.device).masked_fill_(hidden_QL, float("-inf"))
        bias = bias_QL.repeat(q.shape[1] // k.shape[1], 1)[None]
        out.append(_attend(q[:, :, start:stop], k[:, :, first:stop], v[:, :, first:stop], bias, scale, softcap, sinks))
    return torch.cat(out, 2)
