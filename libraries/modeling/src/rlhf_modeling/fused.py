"""Element-wise operations of Llama-like layers in fewer passes over memory: RMS norm, norm + rotary embedding, SwiGLU,
each with its own backward pass. About a quarter of a small model's update on a CPU is element-wise, and autograd over
transformers' code needs two to three times as many passes.

Only layers of known classes without attention dropout are replaced, per instance, and only if a probe gives the same
hidden states. Their linear layers may have adapters.

Shape suffixes: N packed tokens, H hidden size or heads, D head size, F feed-forward width.
"""

from __future__ import annotations

from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from rlhf_modeling.adapters import linear
from rlhf_modeling.attention import PackedAttention, attention_route
from rlhf_modeling.quantized import QuantizedLinear

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LAYERS = frozenset(
    {
        "Qwen3DecoderLayer", "Qwen2DecoderLayer", "LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2VLDecoderLayer",
        "Qwen2_5_VLDecoderLayer", "Qwen3VLTextDecoderLayer",
    }
)  # fmt: skip
FEW = 512
"""For at most this many tokens without gradient (a decoding step), time depends on the number of operations, not on
their size. Queries and keys are then processed as heads of one tensor."""


def fuse_layers(model: PreTrainedModel) -> list[nn.Module]:
    """Replace the forward of every known decoder layer of ``model`` by a fused one. Returns these layers."""
    layers = known_layers(model)
    for layer in layers:
        layer.forward = _FusedLayer(layer)
    return layers


def known_layers(model: PreTrainedModel) -> list[nn.Module]:
    """The decoder layers that can be fused."""
    return [layer for layer in model.modules() if type(layer).__name__ in LAYERS and _can_fuse(layer)]


def restore_layers(layers: list[nn.Module]) -> None:
    """Undo :func:`fuse_layers`."""
    for layer in layers:
        del layer.forward


def _can_fuse(layer: Any) -> bool:
    attention, mlp = layer.self_attn, layer.mlp
    weighted = [m for m in (*attention.children(), *mlp.children()) if isinstance(getattr(m, "weight", None), Tensor)]
    layers = [getattr(m, "base_layer", m) for m in weighted if m.weight.ndim == 2]  # without their adapters
    plain = all(type(m) in (nn.Linear, QuantizedLinear) for m in layers)
    return plain and not attention.attention_dropout and isinstance(mlp.act_fn, nn.SiLU | type(_silu_of_transformers()))


def _silu_of_transformers() -> nn.Module:
    from transformers.activations import ACT2FN

    return ACT2FN["silu"]


class _FusedLayer:
    """The layer's forward for packed rows. Other calls (with a cache, or another route) use the original forward."""

    def __init__(self, layer: Any) -> None:
        self.layer = layer
        self.window = _window(layer)
        # transformers computes a layer again in its __call__ (to 5.22), or in the forward of its class, replaced here
        self.recomputes = type(layer).__call__ is nn.Module.__call__

    def __call__(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        layer, route = self.layer, attention_route()
        embeddings = kwargs.get("position_embeddings")
        plain = args or any(kwargs.get(name) is not None for name in ("cache", "past_key_values", "attention_mask"))
        if plain or embeddings is None or not isinstance(route, PackedAttention):
            # the current class: FSDP gives the layer another one, and only that one's forward recomputes the layer
            return type(layer).forward(layer, hidden_states, *args, **kwargs)
        if self.recomputes and layer.gradient_checkpointing and layer.training and torch.is_grad_enabled():
            return layer._gradient_checkpointing_func(partial(self._packed, route, embeddings), hidden_states)
        return self._packed(route, embeddings, hidden_states)

    def _packed(self, route: PackedAttention, embeddings: tuple[Tensor, Tensor], hidden_states: Tensor) -> Tensor:
        layer, attention, mlp = self.layer, self.layer.self_attn, self.layer.mlp
        device = hidden_states.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden_states.dtype
        cos_ND, sin_ND = (e.squeeze(0).float() for e in embeddings)

        x_NH = hidden_states.squeeze(0)  # its gradient is a view; the gradient of an index would be a new tensor
        h_NH = _norm(layer.input_layernorm, x_NH, dtype)
        heads = (-1, attention.head_dim)
        q_NHD = linear(attention.q_proj, h_NH).unflatten(-1, heads)
        k_NHD = linear(attention.k_proj, h_NH).unflatten(-1, heads)
        v_NHD = linear(attention.v_proj, h_NH).unflatten(-1, heads)
        q_NHD, k_NHD = _norm_rotary(attention, q_NHD, k_NHD, cos_ND, sin_ND, dtype)
        q, k, v = (x.transpose(0, 1)[None] for x in (q_NHD, k_NHD, v_NHD))
        out, _ = route(attention, q, k, v, None, scaling=attention.scaling, sliding_window=self.window)
        x_NH = x_NH + linear(attention.o_proj, out.squeeze(0).flatten(-2))

        h_NH = _norm(layer.post_attention_layernorm, x_NH, dtype)
        y_NF = _SwiGlu.apply(linear(mlp.gate_proj, h_NH), linear(mlp.up_proj, h_NH))
        return (x_NH + linear(mlp.down_proj, y_NF))[None]


def _window(layer: Any) -> int | None:
    """The layer's sliding window: an attribute of the attention; for Mistral, which lacks it, a field of the config."""
    attention = layer.self_attn
    holder = attention.config if type(layer).__name__ == "MistralDecoderLayer" else attention
    window: int | None = getattr(holder, "sliding_window", None)
    return window


def _norm(norm: Any, x_NH: Tensor, dtype: torch.dtype) -> Tensor:
    return _RmsNorm.apply(x_NH, norm.weight, norm.variance_epsilon, dtype)


def _norm_rotary(
    attention: Any, q_NHD: Tensor, k_NKD: Tensor, cos_ND: Tensor, sin_ND: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    q_weight, q_eps = _scale(getattr(attention, "q_norm", None))
    k_weight, k_eps = _scale(getattr(attention, "k_norm", None))
    if len(q_NHD) > FEW or torch.is_grad_enabled() or q_eps != k_eps:
        q_NHD = _NormRotary.apply(q_NHD, q_weight, q_eps, cos_ND, sin_ND, dtype)
        return q_NHD, _NormRotary.apply(k_NKD, k_weight, k_eps, cos_ND, sin_ND, dtype)
    weight, heads = None, (q_NHD.shape[1], k_NKD.shape[1])
    if q_weight is not None and k_weight is not None:
        weight = torch.cat((q_weight.expand(heads[0], -1), k_weight.expand(heads[1], -1)))
    heads_NHD = _NormRotary.apply(torch.cat((q_NHD, k_NKD), 1), weight, q_eps, cos_ND, sin_ND, dtype)
    return heads_NHD.split(heads, 1)


def _scale(norm: Any) -> tuple[Tensor | None, float]:
    """Weight and epsilon of an RMS norm; (None, 0) for a layer without one."""
    return (None, 0.0) if norm is None else (norm.weight, norm.variance_epsilon)


def _inverse_rms(x: Tensor, eps: float) -> Tensor:
    """[..., 1]: 1 / sqrt(mean(x^2) + eps)."""
    # Unlike x.square().mean(), this does not store the squares.
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return torch.addcmul(_constant(eps, norm.device), norm, norm, value=1 / x.shape[-1]).rsqrt_()


@cache
def _constant(value: float, device: torch.device) -> Tensor:
    """fp32 [1], the same tensor at every call, because on a GPU each new one launches a kernel."""
    return torch.full((1,), value, device=device)


def _norm_backward(g: Tensor, x: Tensor, r: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of y = x r(x) weight for x and weight; ``g`` is overwritten. All [M, H] fp32, r [M, 1];
    the weight may be bf16.

    dx = r (g w) - x r^3 / H sum(g w x);  dw = sum over rows of g x r.
    """
    product = g * x
    dweight = torch.mv(product.t(), r[:, 0])
    dot = torch.mv(product, weight.float())[:, None]
    coefficient = r.pow(3).mul_(dot).div_(x.shape[-1])
    return g.mul_(weight).mul_(r).addcmul_(x, coefficient, value=-1.0), dweight


def _fp32_copy(x: Tensor) -> Tensor:
    """An fp32 copy that may be overwritten."""
    return x.float() if x.dtype != torch.float32 else x.clone()


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_NH: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
        x = x_NH.float()
        r = _inverse_rms(x, eps)
        ctx.save_for_backward(x_NH, r, weight)
        return (x * r).mul_(weight).to(dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x_NH, r, weight = ctx.saved_tensors
        dx, dweight = _norm_backward(_fp32_copy(grad), x_NH.float(), r, weight)
        return dx.to(x_NH.dtype), dweight, None, None


class _NormRotary(torch.autograd.Function):
    """Per-head RMS norm (where there is a weight), then the rotary embedding in the two-halves form."""

    @staticmethod
    def forward(
        ctx: Any, x_NHD: Tensor, weight: Tensor | None, eps: float, cos_ND: Tensor, sin_ND: Tensor, dtype: torch.dtype
    ) -> Tensor:
        z, r = x_NHD.float(), None
        if weight is not None:
            r = _inverse_rms(z, eps)
            z = (z * r).mul_(weight)
        ctx.save_for_backward(x_NHD, r, weight, cos_ND, sin_ND)
        return _rotate(z, cos_ND, sin_ND, 1.0).to(dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x_NHD, r, weight, cos_ND, sin_ND = ctx.saved_tensors
        dz = _rotate(grad.float().contiguous(), cos_ND, sin_ND, -1.0)
        if weight is None:
            return dz.to(x_NHD.dtype), None, None, None, None, None
        size = x_NHD.shape[-1]
        dx, dweight = _norm_backward(dz.view(-1, size), x_NHD.float().reshape(-1, size), r.view(-1, 1), weight)
        return dx.view(x_NHD.shape).to(x_NHD.dtype), dweight, None, None, None, None


def _rotate(z_NHD: Tensor, cos_ND: Tensor, sin_ND: Tensor, sign: float) -> Tensor:
    """``sign`` -1 is the transpose; cos and sin repeat over the two halves of D."""
    out = z_NHD * cos_ND[:, None]
    (z1, z2), (out1, out2), (sin, _) = z_NHD.chunk(2, -1), out.chunk(2, -1), sin_ND[:, None].chunk(2, -1)
    out1.addcmul_(z2, sin, value=-sign)
    out2.addcmul_(z1, sin, value=sign)
    return out


class _SwiGlu(torch.autograd.Function):
    """silu(gate) * up; silu is computed again in the backward pass."""

    @staticmethod
    def forward(ctx: Any, gate_NF: Tensor, up_NF: Tensor) -> Tensor:
        ctx.save_for_backward(gate_NF, up_NF)
        return F.silu(gate_NF).mul_(up_NF)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate_NF, up_NF = ctx.saved_tensors
        return torch.ops.aten.silu_backward(grad * up_NF, gate_NF), F.silu(gate_NF).mul_(grad)
