"""Layers divided over the ranks of a replica (Megatron-LM, Shoeybi et al. 2019, section 3).

A rank holds some heads of every attention layer and some units of every feed-forward layer. These are rows of the input
matrices and columns of the output matrix. Each half of a layer is summed over the ranks once in the forward pass, at
its output, and once in the backward pass, at its input. Hidden states, embedding, norms, head, and the gradients of
undivided parameters are whole and equal on every rank. Gradients of the norms of queries and keys are parts of a sum.

An adapter B A is divided like its matrix: B by rows for an input matrix, A by columns for an output matrix. The other
factor is whole on every rank, and its gradients are parts of a sum. No further sum of hidden states is needed.

Shape suffixes: N packed tokens, I and O inputs and outputs of a linear layer, P of this rank's part of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from rlhf.errors import CapabilityError
from rlhf_modeling.adapters import NAME, with_adapter
from rlhf_modeling.kernels import probe_hidden
from rlhf_modeling.loaded import LoadedModel
from rlhf_modeling.noise import has_noise
from torch import Tensor, nn
from torch.nn import functional as F

from rlhf_plugin_deepspeed.tensor_split import TensorSplit
from rlhf_plugin_deepspeed.topology import Topology

if TYPE_CHECKING:
    from transformers import PretrainedConfig

LAYERS = frozenset(
    {
        "LlamaDecoderLayer",
        "MistralDecoderLayer",
        "Qwen2DecoderLayer",
        "Qwen3DecoderLayer",
        "Gemma2DecoderLayer",
        "Gemma3DecoderLayer",
    }
)
HALVES = {"self_attn": (("q_proj", "k_proj", "v_proj"), "o_proj"), "mlp": (("gate_proj", "up_proj"), "down_proj")}
"""{half of a layer: (input matrices, output matrix)}."""
PARTIAL = ("q_norm", "k_norm")
"""Norms of ``self_attn`` that are applied only to this rank's heads."""
AGREE = 1e-3
"""Largest relative norm of the difference between hidden states of the divided and of the whole model."""


class _Enter(torch.autograd.Function):
    """Identity. The gradient is summed over the ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        # A copy, because all_reduce works in place and autograd may use the gradient elsewhere.
        grad_sum = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(grad_sum, group=ctx.group)
        return grad_sum, None


class _Leave(torch.autograd.Function):
    """The sum over the ranks. The gradient passes unchanged."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        output = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(output, group=group)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class Entrance:
    """The common entrance of matrices that read the same input, so that their gradients are summed once."""

    def __init__(self, group: Any, matrices: int) -> None:
        self.group, self.matrices = group, matrices
        self._input: Tensor | None = None
        self._entered: Tensor | None = None
        self._left = 0

    def __call__(self, x: Tensor) -> Tensor:
        if self._entered is None or self._input is not x:
            self._input, self._entered, self._left = x, _Enter.apply(x, self.group), self.matrices
        entered, self._left = self._entered, self._left - 1
        if not self._left:
            self._input = self._entered = None
        assert entered is not None
        return entered


class LinearPart(nn.Module):
    """Some outputs (``dim`` 0: rows of the matrix) or inputs (``dim`` 1: columns) of a linear layer. With ``dim`` 1 the
    bias is not added here, because it must be added once, to the sum over the ranks."""

    def __init__(self, linear: nn.Linear, dim: int, topology: Topology) -> None:
        super().__init__()
        self.weight = _part(linear.weight, dim, topology)
        self.bias = linear.bias if dim or linear.bias is None else _part(linear.bias, 0, topology)
        self.dim = dim

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, None if self.dim else self.bias)


class Inward(LinearPart):
    """Some outputs of a linear layer, on one rank. The input is whole."""

    def __init__(self, linear: nn.Linear, topology: Topology, entrance: Entrance) -> None:
        super().__init__(linear, 0, topology)
        self._entrance = entrance

    def forward(self, x_NI: Tensor) -> Tensor:
        return super().forward(self._entrance(x_NI))


class Outward(LinearPart):
    """Some inputs of a linear layer, on one rank."""

    def __init__(self, linear: nn.Linear, topology: Topology) -> None:
        super().__init__(linear, 1, topology)
        self._group = topology.group

    def forward(self, x_NP: Tensor) -> Tensor:
        return _summed(super().forward(x_NP), self.bias, self._group)


def _summed(own_NO: Tensor, bias: Tensor | None, group: Any) -> Tensor:
    out_NO: Tensor = _Leave.apply(own_NO, group)
    return out_NO if bias is None else out_NO + bias.to(out_NO.dtype)


def _part(tensor: Tensor, dim: int, topology: Topology) -> nn.Parameter:
    part = tensor.detach().chunk(topology.parts, dim)[topology.part].clone()
    return nn.Parameter(part, requires_grad=tensor.requires_grad)


@dataclass(slots=True)
class Divided:
    """How a model's parameters are divided, by their names."""

    dims: dict[str, int] = field(default_factory=dict)
    """{divided parameter: dimension}."""
    partial: set[str] = field(default_factory=set)
    """Whole parameters whose gradients are parts of a sum."""

    def matrix(self, half: Any, name: str, path: str, topology: Topology, entrance: Entrance | None) -> None:
        """Divide the linear layer ``name`` of ``half``, with its adapter if it has one.

        Args:
            entrance: shared entrance of the input matrices; None for an output matrix.
        """
        layer, dim = getattr(half, name), 1 if entrance is None else 0
        linear, layer_path = layer, f"{path}.{name}"
        if hasattr(layer, "lora_A"):
            linear, layer_path = layer.base_layer, f"{layer_path}.base_layer"
            layer.base_layer = LinearPart(linear, dim, topology)
            cut, whole_matrix = (layer.lora_B, "lora_A") if entrance is not None else (layer.lora_A, "lora_B")
            cut[NAME].weight = _part(cut[NAME].weight, dim, topology)
            self.dims[f"{path}.{name}.{'lora_A' if dim else 'lora_B'}.{NAME}.weight"] = dim
            self.partial.add(f"{path}.{name}.{whole_matrix}.{NAME}.weight")
            layer.forward = _adapted(layer, topology, entrance)
        else:
            setattr(half, name, Outward(linear, topology) if entrance is None else Inward(linear, topology, entrance))
        self.dims[f"{layer_path}.weight"] = dim
        if entrance is not None and linear.bias is not None:
            self.dims[f"{layer_path}.bias"] = 0


def _adapted(layer: Any, topology: Topology, entrance: Entrance | None) -> Callable[[Tensor], Tensor]:
    """The forward of a layer with an adapter, both in parts."""

    def forward(x: Tensor) -> Tensor:
        rows = (x if entrance is None else entrance(x)).flatten(0, -2)  # layers that are not fused pass [1, N, I]
        out: Tensor = with_adapter(layer, rows).unflatten(0, x.shape[:-1])
        return out if entrance is not None else _summed(out, layer.base_layer.bias, topology.group)

    return forward


def divide(model: LoadedModel, topology: Topology, device: torch.device) -> TensorSplit:
    """Keep this rank's part of a whole model, and move it to ``device``.

    Raises CapabilityError for layers that are unknown or do not divide evenly, for dropout (the ranks would draw the
    same mask for different heads), and if the hidden states of the divided model differ.
    """
    modules = dict(model.module.named_modules())
    layers = {name: m for name, m in modules.items() if type(m).__name__ in LAYERS}
    _check(model, layers, topology)
    before_NH = probe_hidden(model)
    divided = Divided()
    for name, layer in layers.items():
        for half, (inward, outward) in HALVES.items():
            module, path = getattr(layer, half), f"{name}.{half}"
            entrance = Entrance(topology.group, len(inward))
            for matrix in inward:
                divided.matrix(module, matrix, path, topology, entrance)
            divided.matrix(module, outward, path, topology, None)
        for norm in PARTIAL:
            if isinstance(part := getattr(layer.self_attn, norm, None), nn.Module):
                divided.partial |= {f"{name}.self_attn.{norm}.{p}" for p, _ in part.named_parameters()}
    model.module.eval().to(device)
    after_NH = probe_hidden(model).to(before_NH)
    difference = float((after_NH - before_NH).norm() / before_NH.norm())
    # True also for NaN.
    if not difference < AGREE:
        raise CapabilityError(
            f"tensor_parallel = {topology.parts}: {type(model.module).__name__} computes different results when its "
            f"layers are divided (hidden states differ by {difference:.1e}, norm-wise). Remove the option"
        )
    return TensorSplit(topology, divided.dims, divided.partial)


def check_sizes(settings: PretrainedConfig, model: str, parts: int) -> None:
    """Raises CapabilityError if ``parts`` does not divide sizes in a config. ``model``: the name of its class."""
    config = settings.get_text_config()
    names = ("num_attention_heads", "num_key_value_heads", "intermediate_size")
    # the whole config refuses access to a field that differs between layers
    layers = config.per_layer_config if getattr(config, "is_heterogeneous", False) else [config]
    sizes = dict.fromkeys((name, getattr(layer, name, 0)) for layer in layers for name in names)
    if uneven := ", ".join(f"{name} = {size}" for name, size in sizes if size % parts):
        raise CapabilityError(
            f"tensor_parallel = {parts} does not divide {model}'s {uneven}: use a divisor of all of them"
        )


def _check(model: LoadedModel, layers: dict[str, Any], topology: Topology) -> None:
    class_name, config = type(model.module).__name__, model.module.config.get_text_config()
    if len(layers) != config.num_hidden_layers:
        classes = ", ".join(sorted(name.removesuffix("DecoderLayer") for name in LAYERS))
        raise CapabilityError(
            f"tensor_parallel = {topology.parts}: {class_name} has {config.num_hidden_layers} layers, but only "
            f"{len(layers)} are of a supported kind ({classes}). Remove the option; stage 3 divides any model."
        )
    check_sizes(config, class_name, topology.parts)
    if has_noise(model.module):
        raise CapabilityError(
            f"tensor_parallel = {topology.parts}: {class_name} has dropout or other noise, and its ranks would draw "
            "the same noise for different heads. Set it to 0 in the model's config, or remove tensor_parallel."
        )
