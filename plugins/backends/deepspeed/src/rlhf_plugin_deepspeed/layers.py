"""Layers divided over the ranks of a replica (Megatron-LM, Shoeybi et al. 2019, section 3).

A rank holds some heads of every attention layer and some units of every feed-forward layer: rows of the matrices that
lead into them, columns of those that lead out. Each half of a layer is summed over the ranks once in the forward pass,
where it leads out, and once in the backward pass, where it leads in. Hidden states, embedding, norms and head are whole
on every rank and equal, as are the gradients of what is not divided; those of norms inside a half (of queries and keys)
are parts of a sum.

Shape suffixes: N packed tokens, I and O inputs and outputs of a linear layer, P of this rank's part of them.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from rlhf.errors import CapabilityError
from rlhf.modeling.model import LoadedModel
from rlhf.modeling.packed_model import has_dropout
from torch import Tensor, nn
from torch.nn import functional as F

from rlhf_plugin_deepspeed.grid import Grid

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
"""{half of a layer: (what leads in, what leads out)}."""
PARTIAL = ("q_norm", "k_norm")
"""Norms of ``self_attn`` that see this rank's heads only."""
AGREE = 1e-3
"""Largest difference, norm-wise, between hidden states of the divided and of the whole model."""


class _Enter(torch.autograd.Function):
    """Identity; the gradient is summed over the ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        whole = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(whole, group=ctx.group)
        return whole, None


class _Leave(torch.autograd.Function):
    """The sum over the ranks; the gradient is passed on as it is."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        whole = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(whole, group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class Entrance:
    """What the matrices that read the same input share, so that their gradients are summed once."""

    def __init__(self, group: Any, matrices: int) -> None:
        self.group, self.matrices = group, matrices
        self._given: Tensor | None = None
        self._entered: Tensor | None = None
        self._left = 0

    def __call__(self, x: Tensor) -> Tensor:
        if self._entered is None or self._given is not x:
            self._given, self._entered, self._left = x, _Enter.apply(x, self.group), self.matrices
        entered, self._left = self._entered, self._left - 1
        if not self._left:
            self._given = self._entered = None
        assert entered is not None
        return entered


class Inward(nn.Module):
    """Some outputs of a linear layer: rows of its matrix [P, I]."""

    def __init__(self, whole: nn.Linear, grid: Grid, entrance: Entrance) -> None:
        super().__init__()
        self.weight = _part(whole.weight, 0, grid)
        self.bias = None if whole.bias is None else _part(whole.bias, 0, grid)
        self._entrance = entrance

    def forward(self, x_NI: Tensor) -> Tensor:
        return F.linear(self._entrance(x_NI), self.weight, self.bias)


class Outward(nn.Module):
    """Some inputs of a linear layer: columns of its matrix [O, P]. The bias is added once, to the sum."""

    def __init__(self, whole: nn.Linear, grid: Grid) -> None:
        super().__init__()
        self.weight = _part(whole.weight, 1, grid)
        self.bias = whole.bias
        self._group = grid.group

    def forward(self, x_NP: Tensor) -> Tensor:
        out_NO: Tensor = _Leave.apply(F.linear(x_NP, self.weight), self._group)
        return out_NO if self.bias is None else out_NO + self.bias.to(out_NO.dtype)


def _part(whole: Tensor, dim: int, grid: Grid) -> nn.Parameter:
    part = whole.detach().chunk(grid.parts, dim)[grid.part].clone()
    return nn.Parameter(part, requires_grad=whole.requires_grad)


def divide(loaded: LoadedModel, grid: Grid, device: torch.device) -> tuple[dict[str, int], set[str]]:
    """Keep this rank's part of a whole model, and bring it to ``device``.

    Returns: ({divided parameter: dimension}, parameters whose gradients are parts of a sum).

    Raises CapabilityError for layers that are not known or do not divide evenly, for dropout (each rank would draw the
    same mask for other heads), and where the divided model computes something else.
    """
    named = dict(loaded.module.named_modules())
    layers = {name: m for name, m in named.items() if type(m).__name__ in LAYERS}
    _check(loaded, layers, grid)
    before_NH = _probe(loaded)
    divided: dict[str, int] = {}
    partial: set[str] = set()
    for name, layer in layers.items():
        for half, (inward, outward) in HALVES.items():
            module, where = getattr(layer, half), f"{name}.{half}"
            entrance = Entrance(grid.group, len(inward))
            for matrix in inward:
                setattr(module, matrix, Inward(getattr(module, matrix), grid, entrance))
                divided |= {f"{where}.{matrix}.{p}": 0 for p, _ in getattr(module, matrix).named_parameters()}
            setattr(module, outward, Outward(getattr(module, outward), grid))
            divided[f"{where}.{outward}.weight"] = 1
        for norm in PARTIAL:
            if isinstance(found := getattr(layer.self_attn, norm, None), nn.Module):
                partial |= {f"{name}.self_attn.{norm}.{p}" for p, _ in found.named_parameters()}
    loaded.module.eval().to(device)
    after_NH = _probe(loaded).to(before_NH)
    apart = float((after_NH - before_NH).norm() / before_NH.norm())
    if not apart < AGREE:
        raise CapabilityError(
            f"tensor_parallel = {grid.parts}: {type(loaded.module).__name__} computes something else when its layers "
            f"are divided (hidden states differ by {apart:.1e}, norm-wise): leave it out"
        )
    return divided, partial


def _check(loaded: LoadedModel, layers: dict[str, Any], grid: Grid) -> None:
    who, config = type(loaded.module).__name__, loaded.module.config.get_text_config()
    if len(layers) != config.num_hidden_layers:
        known = ", ".join(sorted(name.removesuffix("DecoderLayer") for name in LAYERS))
        raise CapabilityError(
            f"tensor_parallel = {grid.parts}: {who} has {config.num_hidden_layers} layers, of which {len(layers)} are "
            f"of a kind whose division is known ({known}). Leave it out; stage 3 divides any model."
        )
    sizes = {
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "intermediate_size": config.intermediate_size,
    }
    if uneven := ", ".join(f"{name} = {size}" for name, size in sizes.items() if size % grid.parts):
        raise CapabilityError(
            f"tensor_parallel = {grid.parts} does not divide {who}'s {uneven}: use a divisor of all of them"
        )
    if has_dropout(loaded.module):
        raise CapabilityError(
            f"tensor_parallel = {grid.parts}: {who} has dropout, and its ranks would draw one mask for different heads."
            " Set the model's dropout to 0, or leave tensor_parallel out."
        )


@torch.no_grad()
def _probe(loaded: LoadedModel) -> Tensor:
    """[7, hidden], of two sequences."""
    device = next(loaded.module.parameters()).device
    ids_N = torch.arange(7, device=device) % loaded.vocabulary
    return loaded.hidden(ids_N, torch.tensor([0, 1, 2, 3, 0, 1, 2], device=device), [4, 3]).float()
