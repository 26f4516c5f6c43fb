"""What a live vLLM model really multiplies with, read back out of its packed kernels.

A packed weight cannot be looked at, but it can be asked: the rows of the identity matrix, fed to a linear layer, come
out as the columns of its weight, exactly, as every product is with 1 or 0.
"""

from __future__ import annotations

from typing import Any

import torch
from rlhf.weights.bucket import Bucket
from torch import Tensor, nn
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

from rlhf_plugin_vllm.worker.tensor_names import TensorNames

ROWS = 256
"""Of the identity matrix at a time."""


@torch.no_grad()
def differing(model: nn.Module, bucket: Bucket) -> list[str]:
    """Which of these tensors the model computes with other values of; what it cannot be asked for is left out.

    Only where one worker holds whole layers.
    """
    names, modules = TensorNames(model), dict(model.named_modules())
    found = []
    for name, tensor in bucket.tensors:
        parameter, part = names.place(name)
        path, _, attribute = parameter.rpartition(".")
        layer = modules.get(path)
        if layer is None:
            continue
        if _differs(layer, attribute, part, tensor):
            found.append(name)
        if isinstance(layer, VocabParallelEmbedding):
            for other, head in modules.items():
                if head is not layer and _shares_weight(layer, head) and not _same(_multiplied(head, tensor), tensor):
                    found.append(f"{name} (as the tied {other}, packed)")
    return found


def _differs(layer: Any, attribute: str, part: int | None, tensor: Tensor) -> bool:
    held = getattr(layer, attribute, None)
    if not isinstance(held, Tensor):
        return False
    start = 0 if part is None else sum(getattr(layer, "output_sizes", ())[:part])
    if isinstance(layer, LinearBase) and attribute == "weight" and tensor.dim() == 2:
        return not _same(_multiplied(layer, tensor, start), tensor)
    if part is not None:
        held = held[start : start + len(tensor)]
    if isinstance(layer, VocabParallelEmbedding):
        held = held[: len(tensor)]
        if hasattr(layer, "cpu_linear") and not _same(_multiplied(layer, tensor), tensor):
            return True
    return held.shape == tensor.shape and not _same(held, tensor)


def _multiplied(layer: Any, like: Tensor, start: int = 0) -> Tensor:
    """Rows ``start`` to ``start + len(like)`` of the weight that the layer's kernel uses, [N, K]."""
    rows, columns = like.shape
    dtype = next(p.dtype for p in layer.parameters(recurse=False))
    parts = []
    for first in range(0, columns, ROWS):
        eye_RK = torch.zeros(min(ROWS, columns - first), columns, dtype=dtype)
        eye_RK[torch.arange(len(eye_RK)), torch.arange(first, first + len(eye_RK))] = 1
        parts.append(layer.quant_method.apply(layer, eye_RK, None)[:, start : start + rows])
    return torch.cat(parts).T


def _same(held: Tensor, sent: Tensor) -> bool:
    """Equal in the precision that the model holds; fp32 products on a GPU may pass through shorter arithmetic."""
    sent = sent.to(device=held.device, dtype=held.dtype)
    if held.shape != sent.shape:
        return False
    if held.dtype == torch.float32:
        return bool(torch.allclose(held, sent, rtol=1e-3 if held.is_cuda else 1e-6, atol=0))
    return torch.equal(held, sent)


def _shares_weight(layer: nn.Module, other: nn.Module) -> bool:
    weight = layer._parameters.get("weight")
    return weight is not None and other._parameters.get("weight") is weight
