"""Running the trainer's module for sampling: borrowing it, packed prefill, and one-token steps over slots.

The module computes everything but attention as the trainer runs it. Attention goes through a function registered with
transformers' ``AttentionInterface`` under :data:`NAME`; that name has no mask function, so transformers builds no mask
and who sees whom is decided here alone: in prefill every prompt of the packed row sees itself causally, in a decoding
step every row sees the positions of its own slot up to its own.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from rlhf.errors import ModelError
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.cache_utils import DynamicCache

from rlhf_plugin_local.cache import LayerKV, SlotCache, Step

NAME = "rlhf_sampling"
QUERIES = 512
"""Queries per block where prefill attention is written out (windows, soft caps, sinks): bounds the score matrix."""


@dataclass(slots=True)
class _Plan:
    """What the attention function needs to know about the forward pass under way."""

    lens: list[int] | None = None
    """Prefill: tokens of each prompt in the packed row."""
    step: Step | None = None
    windows: dict[int, int] = field(default_factory=dict)
    """{layer: sliding window}, from the model's config."""
    bias: dict[tuple[int | None, int], Tensor] = field(default_factory=dict)


_plan: ContextVar[_Plan] = ContextVar("rlhf_sampling_plan")


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kw: object,
) -> tuple[Tensor, None]:
    """[B, H, Q, D] queries over [B, H_kv, L, D] keys -> [B, Q, H, D_v]; the signature is transformers'."""
    for name in ("position_bias", "indices", "block_indices"):
        if kw.get(name) is not None:
            raise ModelError(
                f"{type(module).__name__} passes {name!r} to its attention, which sampling in process does not "
                "implement. Use another generator (vllm)."
            )
    if not getattr(module, "is_causal", True):
        raise ModelError(f"{type(module).__name__} attends to later tokens; sampling needs a causal language model.")
    plan = _plan.get()
    window = sliding_window or plan.windows.get(getattr(module, "layer_idx", -1))
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if plan.lens is None:
        bias = _step_bias(plan, window, key.shape[1], key.dtype)
        out = _attend(query.to(key.dtype), key, value, bias, scale, softcap, s_aux)
        return out.transpose(1, 2), None
    dtype = value.dtype
    parts = []
    for q, k, v in zip(query.split(plan.lens, 2), key.split(plan.lens, 2), value.split(plan.lens, 2), strict=True):
        if softcap is None and s_aux is None and (window is None or q.shape[2] <= window):
            out = F.scaled_dot_product_attention(
                q.to(dtype), k.to(dtype), v, is_causal=True, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
            )
        else:
            out = _causal_blocks(q.to(dtype), k.to(dtype), v, scale, window, softcap, s_aux)
        parts.append(out)
    return torch.cat(parts, 2).transpose(1, 2), None


AttentionInterface.register(NAME, _attention)


def _attend(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor, scale: float, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    """Written-out attention without repeated heads: query head h reads key head ``h // (H / H_kv)``.

    For one query a row this is faster on a CPU than the fused kernel with a mask. Softmax in fp32.
    ``bias``: 0 or -inf, broadcastable to [B H_kv, H / H_kv x Q, L]; ``sinks`` [H]: logits that take mass and give none.
    """
    B, H, Q, D = query.shape
    kv, L = key.shape[1], key.shape[2]
    q = query.reshape(B * kv, H // kv * Q, D)
    kT = key.reshape(B * kv, L, D).transpose(1, 2)
    if softcap is None:
        score = torch.baddbmm(bias, q, kT, alpha=scale)
    else:
        score = torch.bmm(q, kT).mul_(scale / softcap).tanh_().mul_(softcap).add_(bias)
    if sinks is None:
        weight = score.softmax(-1, dtype=torch.float32)
    else:
        sink = sinks.float().view(1, kv, H // kv, 1).expand(B, -1, -1, Q).reshape(B * kv, H // kv * Q, 1)
        weight = torch.cat([score.float(), sink], -1).softmax(-1)[..., :-1]
    return torch.bmm(weight.to(value.dtype), value.reshape(B * kv, L, -1)).view(B, H, Q, -1)


def _step_bias(plan: _Plan, window: int | None, kv_heads: int, dtype: torch.dtype) -> Tensor:
    """[S H_kv, 1, L], 0 where a row's query sees the position; built once a step and window."""
    if (window, kv_heads) not in plan.bias:
        position_S1, L = plan.step.position_S[:, None], plan.step.length
        at_L = torch.arange(L, device=position_S1.device)
        hidden_SL = at_L > position_S1
        if window is not None:
            hidden_SL |= at_L <= position_S1 - window
        bias_SL = torch.zeros(hidden_SL.shape, dtype=dtype, device=hidden_SL.device)
        bias_SL.masked_fill_(hidden_SL, float("-inf"))
        plan.bias[window, kv_heads] = bias_SL.repeat_interleave(kv_heads, 0)[:, None]
    return plan.bias[window, kv_heads]


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


class Decoder:
    """A causal language model of transformers, as the generator uses it: a reference, nothing changed for good."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.dtype: torch.dtype | None = None
        """Autocast to it; None runs the module as it is."""
        models = [m for m in module.modules() if isinstance(m, PreTrainedModel)]
        _check(models)
        self.config = models[0].config.get_text_config()
        self._configs = list({id(m.config): m.config for m in models}.values())
        self._windows = _windows(self.config)
        self._keep = "logits_to_keep" in inspect.signature(models[0].forward).parameters
        self.device = next(module.parameters()).device
        self.layers = self.config.num_hidden_layers
        self.vocabulary = self.config.vocab_size
        self.positions: int | None = getattr(self.config, "max_position_embeddings", None)

    @contextmanager
    def borrowed(self) -> Iterator[None]:
        """Evaluation mode, our attention, no gradient; all as found afterwards, whatever happens inside.

        Must not be held over a ``yield`` to a consumer: it would see the module in this state.
        """
        training = [m for m in self.module.modules() if m.training]
        attention = [c._attn_implementation_internal for c in self._configs]
        try:
            for m in training:
                m.training = False
            for c in self._configs:
                c._attn_implementation_internal = NAME
            with torch.no_grad(), torch.autocast(self.device.type, self.dtype, enabled=self.dtype is not None):
                yield
        finally:
            for m in training:
                m.training = True
            for c, name in zip(self._configs, attention, strict=True):
                c._attn_implementation_internal = name

    def prefill(self, prompts: Sequence[Sequence[int]]) -> tuple[Tensor, list[list[LayerKV]]]:
        """Logits after each prompt [P, V], and per prompt its keys and values by layer; one packed row, no padding."""
        lens = [len(p) for p in prompts]
        ids_1N = torch.tensor([[i for p in prompts for i in p]], device=self.device)
        position_1N = torch.cat([torch.arange(n, device=self.device) for n in lens])[None]
        last_P = torch.tensor(lens, device=self.device).cumsum(0) - 1
        cache = DynamicCache()
        logits_PV = self._forward(_Plan(lens=lens, windows=self._windows), ids_1N, position_1N, cache, last_P)
        layers = [(la.keys[0].split(lens, 1), la.values[0].split(lens, 1)) for la in cache.layers]
        return logits_PV, [[(k[i], v[i]) for k, v in layers] for i in range(len(prompts))]

    def step(self, token_S: Tensor, step: Step, cache: SlotCache) -> Tensor:
        """Feed one token per row at its position; logits of the next one, [S, V]."""
        cache.begin(step)
        plan = _Plan(step=step, windows=self._windows)
        return self._forward(plan, token_S[:, None], step.position_S[:, None], cache, None)

    def _forward(self, plan: _Plan, ids: Tensor, position: Tensor, cache: object, keep_P: Tensor | None) -> Tensor:
        extra = {"logits_to_keep": keep_P} if keep_P is not None and self._keep else {}
        token = _plan.set(plan)
        try:
            out = self.module(
                input_ids=ids, position_ids=position, past_key_values=cache, use_cache=True, return_dict=True, **extra
            )
        finally:
            _plan.reset(token)
        if keep_P is None:
            return out.logits[:, -1]
        return out.logits[0] if self._keep else out.logits[0, keep_P]


def _check(models: list[PreTrainedModel]) -> None:
    """Refuse what the slot cache would sample from wrongly."""
    if not models:
        raise ModelError("the generator 'transformers' samples from a transformers PreTrainedModel; got none.")
    model, config = models[0], models[0].config.get_text_config()
    name, why = type(model).__name__, ""
    kinds = sorted(set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"})
    if kinds:
        why = (
            f"has layers of type {', '.join(kinds)}, whose state is not a key-value cache of full or sliding attention"
        )
    elif any(m._is_stateful for m in models):
        why = "keeps a recurrent state (state space, linear attention), not a key-value cache"
    elif getattr(models[0].config, "is_encoder_decoder", False):
        why = "is an encoder-decoder"
    elif getattr(config, "num_kv_shared_layers", 0):
        why = "shares keys and values between layers"
    elif not all(m._supports_attention_backend for m in models):
        why = "does not take its attention function from transformers' AttentionInterface"
    if why:
        raise ModelError(
            f"{name} {why}; the generator 'transformers' cannot sample from it. Use another generator "
            '([generator] use = "vllm") or another model.'
        )


def _windows(config: object) -> dict[int, int]:
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None) or ()
    return {i: window for i, kind in enumerate(kinds) if kind == "sliding_attention" and window}
