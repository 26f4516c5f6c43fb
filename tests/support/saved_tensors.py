"""What autograd keeps for the backward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks


def saved_bytes(module: torch.nn.Module, compute: Callable[[], Any], *, bf16: bool) -> int:
    """Bytes of all distinct storages that ``compute`` keeps, without the weights of ``module`` and their casts.

    Args:
        bf16: under autocast.
    """
    weights = {p.untyped_storage().data_ptr() for p in module.parameters()}
    shapes = {tuple(p.shape) for p in module.parameters()}
    shapes |= {tuple(reversed(shape)) for shape in shapes}
    sizes: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        cast = tensor.dtype == torch.bfloat16 and tuple(tensor.shape) in shapes
        if storage.data_ptr() not in weights and not cast:
            sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(keep, lambda t: t), torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        compute()
    return sum(sizes.values())
