"""Divides a model over ranks: one group of parameters per decoder layer, and one of everything else.

The group of everything else (embedding, last norm, head) is the root. It is whole from the start of a forward pass to
the end of its backward pass. So the head can compute its logits in chunks, and again in the backward pass, without a
further gathering, and ranks may have different numbers of chunks.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection

import torch.distributed as dist
from rlhf.errors import CapabilityError
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer


def decoder_layers(module: PreTrainedModel) -> list[nn.Module]:
    """The layers that transformers never splits over devices; where it names none, those that it can compute again in
    the backward pass. Layers inside of layers do not count.

    Raises CapabilityError where there are none.
    """
    names = frozenset(getattr(module, "_no_split_modules", None) or ())
    found = _outermost(module, names) or _outermost(module, frozenset())
    if not found:
        raise CapabilityError(
            f"trainer 'fsdp' divides a model layer by layer, and {type(module).__name__} names no layers "
            "(_no_split_modules, or subclasses of GradientCheckpointingLayer). Use a model that does, or trainer "
            "'deepspeed' with stage 3."
        )
    return found


def _outermost(module: nn.Module, names: Collection[str]) -> list[nn.Module]:
    found = []
    for child in module.children():
        wanted = type(child).__name__ in names if names else isinstance(child, GradientCheckpointingLayer)
        found += [child] if wanted else _outermost(child, names)
    return found


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
    # fused layers return views, which nothing changes in place
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor", UserWarning)
    try:
        for layer in layers:
            fully_shard(layer, mesh=mesh, reshard_after_forward=reshard)
        fully_shard(root, mesh=mesh, reshard_after_forward=False)
    except ValueError as cause:
        raise CapabilityError(f"trainer 'fsdp' cannot divide {type(module).__name__}: {cause}") from cause
    for part in root.modules():
        if isinstance(part, FSDPModule):
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)  # gloo has no other reduction
            # else ranks that use different parameters would reduce different elements
            part.set_reduce_scatter_unused_params(True, recurse=False)
