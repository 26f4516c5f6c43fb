"""Linear layers with frozen weights in 4 or 8 bits, through bitsandbytes.

bitsandbytes provides the formats; torch computes the products with the dequantised weight. So a layer computes the same
on every device, and generators and exports get exactly the weight that was used in training.

Shape suffixes: N tokens, I inputs and O outputs of a layer.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Collection
from typing import Any, Literal

import torch
from rlhf.errors import ConfigError
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from rlhf_modeling.adapters import NAME, adaptable

Format = Literal["nf4", "int8"]
BYTES: dict[Format, float] = {"nf4": 0.5 + 1 / 64 + 4 / (64 * 256), "int8": 1.0}
"""Bytes per weight. NF4 has one 8-bit scale per 64 weights, and one 32-bit scale per 256 of those."""


class QuantizedLinear(nn.Module):
    """A frozen linear layer. In a state dict its weight is a tensor of the right shape without values (``meta``).

    Args:
        linear: the layer to replace.
        device: the device on which the weight is quantised and stays.
    """

    def __init__(self, linear: nn.Linear, kind: Format, device: torch.device) -> None:
        super().__init__()
        self.in_features, self.out_features, self.kind = linear.in_features, linear.out_features, kind
        self.bias, self.dtype = linear.bias, linear.weight.dtype
        self._values = _quantized(linear.weight.detach().to(device, torch.float32), kind)

    @property
    def weight(self) -> Tensor:
        """[O, I] in the number format of the replaced layer. It is dequantised again at every call."""
        functional, values = _functional(), self._values
        weight_OI: Tensor = (functional.dequantize_4bit if self.kind == "nf4" else functional.int8_vectorwise_dequant)(
            *values
        )
        return weight_OI.to(self.dtype)

    def forward(self, x_NI: Tensor) -> Tensor:
        y_NO: Tensor = _Product.apply(x_NI, self)
        return y_NO if self.bias is None else y_NO + self.bias.to(y_NO.dtype)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight"] = torch.empty(
            self.out_features, self.in_features, dtype=self.dtype, device="meta"
        )


class _Product(torch.autograd.Function):
    """x W^T. The weight is dequantised again in the backward pass, so that no dequantised weight is kept until then."""

    @staticmethod
    def forward(ctx: Any, x_NI: Tensor, layer: QuantizedLinear) -> Tensor:
        ctx.layer, ctx.dtype = layer, x_NI.dtype
        return F.linear(x_NI, layer.weight.to(x_NI.dtype))  # under autocast, both are cast

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_NO: Tensor) -> tuple[Tensor, None]:
        return (grad_NO @ ctx.layer.weight.to(grad_NO.dtype)).to(ctx.dtype), None


def quantize_layers(module: nn.Module, names: Collection[str], kind: Format, device: torch.device) -> None:
    """Replace the linear layers ``names``, or the layers under their adapters, one at a time.

    A magnitude of DoRA becomes the length of the dequantised row, so that adapters initially have no effect.
    """
    for name in names:
        layer: Any = module.get_submodule(name)
        if hasattr(layer, "base_layer"):
            layer.base_layer = QuantizedLinear(layer.base_layer, kind, device)
            if NAME in layer.lora_magnitude_vector:
                length_O = torch.linalg.vector_norm(layer.base_layer.weight.float(), dim=1)
                magnitude = layer.lora_magnitude_vector[NAME].weight
                magnitude.data.copy_(length_O)
            continue
        owner, _, last = name.rpartition(".")
        setattr(module.get_submodule(owner), last, QuantizedLinear(layer, kind, device))


def quantizable(module: nn.Module, head: nn.Module | None, saved: Collection[str]) -> list[str]:
    """Names of the frozen linear layers: all except the head and the layers in fully trained modules."""
    prefixes = tuple(f"{name}." for name in saved)
    return [name for name, _ in adaptable(module, head) if not f"{name}.".startswith(prefixes)]


def require_quantization(option: str, kind: Format, device: torch.device) -> None:
    """Raises ConfigError if bitsandbytes is absent or cannot quantise on ``device``.

    Args:
        option: the option that needs it, for the message.
    """
    if importlib.util.find_spec("bitsandbytes") is None:
        raise ConfigError(f"{option} needs bitsandbytes: pip install bitsandbytes, or remove the option")
    try:
        _quantized(torch.ones(2, 64, device=device), kind)
    except Exception as cause:  # any exception: a library without kernels for this device may raise anything
        raise ConfigError(
            f"{option}: bitsandbytes cannot quantise on {device.type} here "
            f"({type(cause).__name__}: {cause}). Remove the option."
        ) from cause


def _quantized(weight_OI: Tensor, kind: Format) -> tuple[Any, Any]:
    functional = _functional()
    if kind == "nf4":
        values, state = functional.quantize_4bit(weight_OI, quant_type="nf4", compress_statistics=True)
        return values, state
    values, scale_O, _ = functional.int8_vectorwise_quant(weight_OI.to(torch.float16))  # a GPU accepts only fp16
    return values, scale_O


def _functional() -> Any:
    import bitsandbytes.functional

    return bitsandbytes.functional
