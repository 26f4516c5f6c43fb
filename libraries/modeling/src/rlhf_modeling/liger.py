"""Liger's Triton kernels on a model's own layers: RMS norm, rotary embedding, SwiGLU and GeGLU (Hsu et al. 2024,
arXiv:2410.10989; the package liger-kernel). Its cross-entropies are not used, because logits stay in chunks
(:mod:`rlhf_modeling.heads`).

The package's ``apply_liger_kernel_to_...`` replace transformers' classes and functions for the whole process. Here only
the forwards of one model's modules call the package's functions, so other roles in the process do not change. Modules
with weights are still called as modules, because weights may be divided and matrices may have adapters.

Deviations: 1. the backward pass of a norm does not overwrite its input gradient; 2. under bf16, norms of queries and
keys pass bf16 to the rotary embedding; transformers keeps fp32 between the two.
"""

from __future__ import annotations

import importlib.util
import inspect
import os
from dataclasses import dataclass
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any

import torch
from rlhf.errors import CapabilityError
from torch import nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel

INSTALL = "pip install liger-kernel"
ROTARY = "apply_rotary_pos_emb"
"""Name of the function that transformers' attention layers call for the rotary embedding."""


@dataclass(frozen=True, slots=True)
class Kind:
    """Norm and feed-forward layer of one model family."""

    offset: float
    """Added to a norm's weight."""
    casting: str
    """Liger's name for the norm's order of casts."""
    activation: str
    """transformers' name for the activation function of the gate."""


LLAMA, GEMMA = Kind(0.0, "llama", "silu"), Kind(1.0, "gemma", "gelu_pytorch_tanh")
LAYERS = {
    "LlamaDecoderLayer": LLAMA,
    "MistralDecoderLayer": LLAMA,
    "Qwen2DecoderLayer": LLAMA,
    "Qwen3DecoderLayer": LLAMA,
    "Gemma2DecoderLayer": GEMMA,
    "Gemma3DecoderLayer": GEMMA,
}


def why_not(device: str) -> str:
    """Why the kernels are not available in this process. Empty if they are available for known layers.

    Args:
        device: ``cpu`` | ``cuda``. With TRITON_INTERPRET = 1 Triton interprets them on a CPU. This is for tests only:
            it takes seconds instead of microseconds.
    """
    if device != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return f"Liger's kernels run on GPUs, but this role is on {device!r}"
    if importlib.util.find_spec("liger_kernel") is None:
        return f"the package liger-kernel is not installed: {INSTALL}"
    return ""


def use_liger(model: PreTrainedModel) -> list[nn.Module]:
    """Make norms, feed-forward and attention layers of ``model`` call Liger's functions. Returns these modules.

    Raises CapabilityError for unknown layers, before anything is changed.
    """
    kind, layers = _supported_layers(model)
    forwards: dict[nn.Module, Any] = {
        module: _norm(module, kind) for module in model.modules() if type(module).__name__.endswith("RMSNorm")
    }
    for layer in layers:
        forwards[layer.mlp] = _gated(layer.mlp, kind)
        forwards[layer.self_attn] = _rotating(layer.self_attn)
    for module, forward in forwards.items():
        module.forward = forward
    return list(forwards)


def _supported_layers(model: PreTrainedModel) -> tuple[Kind, list[Any]]:
    from transformers.activations import ACT2FN

    model_name, count = type(model).__name__, model.config.get_text_config().num_hidden_layers
    layers: list[Any] = [m for m in model.modules() if type(m).__name__ in LAYERS]
    if len(layers) != count:
        names = ", ".join(sorted(name.removesuffix("DecoderLayer") for name in LAYERS))
        raise CapabilityError(
            f"trainer.kernels = 'liger': {model_name} has {count} layers, but only {len(layers)} are of a supported "
            f"kind ({names}). Remove the option."
        )
    kind = LAYERS[type(layers[0]).__name__]
    activation = type(ACT2FN[kind.activation])
    if other := {type(m.mlp.act_fn) for m in layers} - {activation}:
        raise CapabilityError(
            f"trainer.kernels = 'liger': the gates of {model_name} use {other.pop().__name__}, but the kernel computes "
            f"{activation.__name__}. Remove the option."
        )
    return kind, layers


def _norm(norm: Any, kind: Kind) -> Any:
    from liger_kernel.transformers.functional import liger_rms_norm

    eps: float = norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps

    def forward(x: torch.Tensor) -> torch.Tensor:
        return liger_rms_norm(x, norm.weight, eps, kind.offset, kind.casting, False)

    return forward


def _gated(mlp: Any, kind: Kind) -> Any:
    from liger_kernel.transformers.functional import liger_geglu, liger_swiglu

    gated = liger_swiglu if kind is LLAMA else liger_geglu

    def forward(x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = mlp.down_proj(gated(mlp.gate_proj(x), mlp.up_proj(x)))
        return out

    return forward


def _rotating(attention: Any) -> Any:
    """transformers' own forward of the layer, in which the name ``ROTARY`` refers to Liger's function."""
    from liger_kernel.transformers.functional import liger_rope

    # Without decorators, because only the code of the function itself names ROTARY.
    plain: Any = inspect.unwrap(type(attention).forward)
    if ROTARY not in plain.__code__.co_names:
        raise CapabilityError(
            f"trainer.kernels = 'liger': {type(attention).__name__} of the installed transformers does not call "
            f"{ROTARY}. Remove the option."
        )
    names = {**plain.__globals__, ROTARY: liger_rope}
    forward = FunctionType(plain.__code__, names, plain.__name__, plain.__defaults__, plain.__closure__)
    forward.__kwdefaults__ = plain.__kwdefaults__
    return MethodType(forward, attention)
