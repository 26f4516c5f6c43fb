"""Divides a model over ranks: one group of parameters per decoder layer, and one of everything else.

The group of everything else (embedding, last norm, head) is the root. It is whole from the start of a forward pass to
the end of its backward pass. So the head can compute its logits in chunks, and again in the backward pass, without
another all-gather. Ranks may have different numbers of chunks.

Trained weights that are stored in bf16 are divided in fp32, as masters. The optimizer updates the masters, and a rank
rounds its rows to bf16 before they are gathered, so no rank holds both. Their gradients are bf16 and are summed in
fp32, over ranks and micro-batches.

Linear layers under autocast keep their weight for the backward pass instead of its bf16 copy. Autograd would keep the
copies of all layers until the backward pass, so every rank would hold the whole model in bf16. The weight itself is
freed between the passes and gathered again.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from rlhf.errors import CapabilityError
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        """``x``: [..., I]; ``weight``: [O, I]; ``bias``: [O] or None. [..., O] in ``dtype``."""
        narrow = x.to(dtype)
        ctx.save_for_backward(narrow, weight)
        ctx.dtypes = x.dtype, None if bias is None else bias.dtype
        with torch.autocast(x.device.type, enabled=False):
            return _plain(narrow, weight.to(dtype), None if bias is None else bias.to(dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        narrow, weight = ctx.saved_tensors
        wide, of_bias = ctx.dtypes
        rows_NO = grad.reshape(-1, grad.shape[-1])
        with torch.autocast(grad.device.type, enabled=False):
            dx = (grad @ weight.to(grad.dtype)).to(wide) if ctx.needs_input_grad[0] else None
            dweight = None
            if ctx.needs_input_grad[1]:
                dweight = (rows_NO.t() @ narrow.reshape(-1, narrow.shape[-1])).to(weight.dtype)
            dbias = rows_NO.sum(0).to(of_bias) if of_bias is not None and ctx.needs_input_grad[2] else None
        return dx, dweight, dbias, None


# torch's own function, also while :func:`sparing_linear` replaces it.
_plain: Any = torch.nn.functional.linear


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    device = x.device.type
    if not torch.is_autocast_enabled(device):
        result: Tensor = _plain(x, weight, bias)
        return result
    return _Linear.apply(x, weight, bias, torch.get_autocast_dtype(device))


@contextmanager
def sparing_linear(enabled: bool) -> Iterator[None]:
    """Context in which torch's function for linear layers keeps their weight."""
    functional: Any = torch.nn.functional
    torch_linear = functional.linear
    if enabled:
        functional.linear = _linear
    try:
        yield
    finally:
        functional.linear = torch_linear


def decoder_layers(module: PreTrainedModel) -> list[nn.Module]:
    """The layers that transformers never splits over devices. If it names none, the layers that it can recompute in the
    backward pass. Layers inside of layers do not count.

    Raises CapabilityError if there are none.
    """
    names = frozenset(getattr(module, "_no_split_modules", None) or ())
    layers = _outermost(module, names) or _outermost(module, frozenset())
    if not layers:
        raise CapabilityError(
            f"trainer 'fsdp' divides a model layer by layer, but {type(module).__name__} declares no layers "
            "(_no_split_modules, or subclasses of GradientCheckpointingLayer). Use a model that does, or trainer "
            "'deepspeed' with stage 3."
        )
    return layers


def _outermost(module: nn.Module, names: Collection[str]) -> list[nn.Module]:
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers = []
    for child in module.children():
        is_layer = type(child).__name__ in names if names else isinstance(child, GradientCheckpointingLayer)
        layers += [child] if is_layer else _outermost(child, names)
    return layers


def divide(root: nn.Module, module: PreTrainedModel, device: str, reshard: bool) -> None:
    """Divide the parameters of ``root``, which computes a micro-batch with ``module``, over the ranks of the default
    process group. Parameters move to ``device`` layer by layer. Gradients are sums over ranks.

    Args:
        reshard: free a layer's weights between its forward and its backward pass.
    """
    world = dist.group.WORLD
    assert world is not None
    mesh = DeviceMesh.from_group(world, device)
    layers = decoder_layers(module)
    # fused layers return views, which are never changed in place
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor", UserWarning)
    try:
        for layer in layers:
            policy = _with_masters(layer.named_parameters(), type(layer).__name__)
            fully_shard(layer, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy)
        rest = ((name, p) for name, p in module.named_parameters() if not isinstance(p, DTensor))
        policy = _with_masters(rest, "the part outside of the layers")
        fully_shard(root, mesh=mesh, reshard_after_forward=False, mp_policy=policy)
    except ValueError as cause:
        raise CapabilityError(f"trainer 'fsdp' cannot divide {type(module).__name__}: {cause}") from cause
    for part in root.modules():
        if isinstance(part, FSDPModule):
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)  # gloo has no other reduction
            # otherwise ranks that use different parameters would reduce different elements
            part.set_reduce_scatter_unused_params(True, recurse=False)


def _with_masters(parameters: Iterable[tuple[str, nn.Parameter]], group: str) -> MixedPrecisionPolicy:
    """Replace a group's trained parameters that are stored in bf16 by their masters. Returns how FSDP rounds the group.
    Frozen parameters are gathered in their stored format.

    Raises CapabilityError if the model keeps some of the group's trained parameters in fp32, because FSDP rounds all of
    them or none.
    """
    trained = {name: p for name, p in parameters if p.requires_grad}
    stored = {name: p for name, p in trained.items() if p.dtype == torch.bfloat16}
    if not stored:
        return MixedPrecisionPolicy()
    if wide := sorted(trained.keys() - stored.keys()):
        raise CapabilityError(
            f"storage = 'bf16' with trainer 'fsdp': {group} has {wide[0]!r} in fp32 beside {min(stored)!r} in bf16, "
            "and FSDP gathers trained weights that belong together in one number format. Set storage = 'fp32' for "
            "this role, or use trainer 'torch'."
        )
    for p in stored.values():
        p.data = p.data.float()
    return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)
