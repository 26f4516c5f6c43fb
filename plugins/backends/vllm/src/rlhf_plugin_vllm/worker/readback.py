"""Reads the weights that a running vLLM model multiplies with, after they were packed for its kernels.

A packed weight cannot be read directly. The layer computes it instead: for the rows of the identity matrix a linear
layer returns the columns of its weight, exactly, because every product has a factor 1 or 0.
"""

from __future__ import annotations

from typing import Any

import torch
from rlhf.weights.bucket import Bucket
from torch import Tensor, nn
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

from rlhf_plugin_vllm.worker.quantized import is_quantised, quantised
from rlhf_plugin_vllm.worker.tensor_names import TensorNames

ROWS = 256
"""Rows of the identity matrix per call."""


@torch.no_grad()
def differing(model: nn.Module, bucket: Bucket) -> list[str]:
    """Names of the bucket's tensors whose values differ from the model's. Tensors that cannot be read back are left
    out.

    The model must hold whole layers, not layers that are split over workers.
    """
    names, modules = TensorNames(model), dict(model.named_modules())
    differences = []
    for name, tensor in bucket.tensors:
        parameter, part = names.place(name)
        path, _, attribute = parameter.rpartition(".")
        layer = modules.get(path)
        if layer is None:
            continue
        if _differs(layer, attribute, part, tensor):
            differences.append(name)
        if isinstance(layer, VocabParallelEmbedding):
            for other, head in modules.items():
                if (
                    head is not layer
                    and _shares_weight(layer, head)
                    and not _is_equal(_multiplied(head, tensor), tensor)
                ):
                    differences.append(f"{name} (as the tied {other}, packed)")
    return differences


def _differs(layer: Any, attribute: str, part: int | None, tensor: Tensor) -> bool:
    weight = getattr(layer, attribute, None)
    if not isinstance(weight, Tensor):
        return False
    start = 0 if part is None else sum(getattr(layer, "output_sizes", ())[:part])
    if is_quantised(layer) and attribute == "weight":
        return not _is_equal(_multiplied(layer, tensor, start), quantised(tensor.to(layer.orig_dtype)), 2**-7)
    if isinstance(layer, LinearBase) and attribute == "weight" and tensor.dim() == 2:
        return not _is_equal(_multiplied(layer, tensor, start), tensor)
    if part is not None:
        weight = weight[start : start + len(tensor)]
    if isinstance(layer, VocabParallelEmbedding):
        weight = weight[: len(tensor)]
        if hasattr(layer, "cpu_linear") and not _is_equal(_multiplied(layer, tensor), tensor):
            return True
    return weight.shape == tensor.shape and not _is_equal(weight, tensor)


def _multiplied(layer: Any, like: Tensor, start: int = 0) -> Tensor:
    """Rows ``start`` to ``start + len(like)`` of the weight that the layer's kernel uses, shape [N, K]."""
    rows, columns = like.shape
    dtype = getattr(layer, "orig_dtype", next(p.dtype for p in layer.parameters(recurse=False)))
    parts = []
    for first in range(0, columns, ROWS):
        eye_RK = torch.zeros(min(ROWS, columns - first), columns, dtype=dtype)
        eye_RK[torch.arange(len(eye_RK)), torch.arange(first, first + len(eye_RK))] = 1
        parts.append(layer.quant_method.apply(layer, eye_RK, None)[:, start : start + rows])
    return torch.cat(parts).T


def _is_equal(value: Tensor, reference: Tensor, share: float = 0) -> bool:
    """Whether two tensors are equal in the model's precision, up to ``share`` of each value. fp32 products on a GPU
    may use TF32, so they get a tolerance."""
    reference = reference.to(device=value.device, dtype=value.dtype)
    if value.shape != reference.shape:
        return False
    if share:
        return bool(torch.allclose(value, reference, rtol=share, atol=0))
    if value.dtype == torch.float32:
        return bool(torch.allclose(value, reference, rtol=1e-3 if value.is_cuda else 1e-6, atol=0))
    return torch.equal(value, reference)


def _shares_weight(layer: nn.Module, other: nn.Module) -> bool:
    weight = layer._parameters.get("weight")
    return weight is not None and other._parameters.get("weight") is weight
