"""The layers of a vLLM model that quantise their weights at every load, and the proof that they hold the right values.

Log-probs of a quantised model differ too much from the trainer's to reveal one wrong layer. So a worker quantises each
received tensor, multiplies it with a vector of random signs, and compares the product with the result of the layer's
kernel (Freivalds 1979). Both represent the signs exactly.

Shape suffixes: N outputs and K inputs of a layer.
"""

from __future__ import annotations

from typing import Any

import torch
from rlhf.errors import SyncError, short_list
from rlhf.weights.bucket import Bucket
from torch import Tensor, nn
from vllm.model_executor.layers.linear import LinearBase

from rlhf_plugin_vllm.worker.tensor_names import TensorNames

ROUNDING = 2**-6
"""Share of the largest product of a tensor. Kernels round to bf16: in a real model up to 0.004 of it."""
FORMAT = torch.float8_e4m3fn


class QuantisedLayers:
    """The quantised layers of a packed model, and the products that they must return after one load. Layers that are
    split over workers have only parts of the tensors and are not checked."""

    def __init__(self, model: nn.Module, names: TensorNames) -> None:
        self.names = names
        self.layers: dict[str, Any] = {
            path: layer for path, layer in model.named_modules() if is_quantised(layer) and layer.tp_size == 1
        }
        self.devices = {path: layer.weight.device for path, layer in self.layers.items()}
        """Devices of the weights. A reload first moves weights to torch's device ``meta``."""
        self.products: dict[str, tuple[str, int | None, Tensor]] = {}
        """{name as the trainer sent it: (layer, part of it, product [N])}."""

    def add(self, bucket: Bucket) -> None:
        """Add the products of received tensors."""
        for name, tensor in bucket.tensors:
            parameter, part = self.names.place(name)
            path, _, attribute = parameter.rpartition(".")
            if path in self.layers and attribute == "weight":
                layer = self.layers[path]
                weight_NK = quantised(tensor.to(self.devices[path], layer.orig_dtype))
                self.products[name] = path, part, weight_NK @ signs(weight_NK)

    def check(self) -> None:
        """Raises SyncError, with the names, if a packed layer computes with other values than the received ones."""
        mismatches = []
        for name, (path, part, product_N) in self.products.items():
            layer = self.layers[path]
            start = 0 if part is None else sum(layer.output_sizes[:part])
            input_1K = signs(layer.weight.new_empty(1, layer.input_size, dtype=layer.orig_dtype))[None]
            output_N = layer.quant_method.apply(layer, input_1K, None)[0, start : start + len(product_N)]
            difference = (output_N.float() - product_N).abs().max()
            if not difference <= ROUNDING * product_N.abs().max():
                mismatches.append(name)
        if mismatches:
            names = short_list(mismatches, 8)
            raise SyncError(f"quantised layers compute with weights that differ from those that arrived: {names}.")


def is_quantised(layer: nn.Module) -> bool:
    weight = layer._parameters.get("weight")
    return isinstance(layer, LinearBase) and weight is not None and weight.dtype == FORMAT


def quantised(weight_NK: Tensor) -> Tensor:
    """The weight as vLLM's ``fp8_per_channel`` quantises it, in fp32: E4M3 with a scale for each row."""
    limit, rows_NK = torch.finfo(FORMAT).max, weight_NK.float()
    # The lower bound is vLLM's smallest scale. It keeps rows of zeros finite.
    scale_N1 = (rows_NK.abs().amax(1, keepdim=True) / limit).clamp_min(1 / (limit * 512))
    return (rows_NK / scale_N1).clamp(-limit, limit).to(FORMAT).float() * scale_N1


def signs(weight_NK: Tensor) -> Tensor:
    """[K] of 1 and -1, the same for each K, in the format of the weight and on its device."""
    columns = weight_NK.shape[1]
    bits_K = torch.randint(0, 2, (columns,), generator=torch.Generator().manual_seed(columns), device="cpu")
    return (2 * bits_K - 1).to(weight_NK)
