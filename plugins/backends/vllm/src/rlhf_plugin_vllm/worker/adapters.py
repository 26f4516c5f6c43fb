"""Loads low-rank adapters from memory into a running vLLM model, beside its base's weights.

vLLM itself reads adapters from files. Here each worker creates vLLM's objects from the received tensors, and puts them
into the slot that requests name (:data:`ADAPTER`). Requests for the base do not name it.

Shape suffixes: R rank, I inputs and O outputs of a layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from rlhf.errors import SyncError
from rlhf.interfaces.model import ADAPTER_PREFIX, LowRankAdapters
from rlhf.weights.bucket import Bucket
from torch import Tensor
from vllm.lora.lora_model import LoRAModel
from vllm.lora.lora_weights import LoRALayerWeights

from rlhf_plugin_vllm.engine.adapters import ADAPTER
from rlhf_plugin_vllm.worker.readback import differing
from rlhf_plugin_vllm.worker.reload import Reload
from rlhf_plugin_vllm.worker.tensor_names import TensorNames


class AdapterLoads:
    """Consecutive loads of one worker's model: :meth:`begin`, buckets by :meth:`take`, then :meth:`end` or
    :meth:`abandon`. A load contains the base's tensors, the adapters', or both."""

    def __init__(self, runner: Any, model_config: Any, adapters: LowRankAdapters, has_whole_layers: bool) -> None:
        """``has_whole_layers``: the worker has whole layers, not parts of them."""
        self.model: Any = runner.get_model()
        self.manager: Any = runner.lora_manager._adapter_manager
        self.model_config, self.adapters, self.has_whole_layers = model_config, adapters, has_whole_layers
        self.names = TensorNames(self.model)
        self.dtype: torch.dtype = self.manager.lora_config.lora_dtype
        self.has_base = False
        """Whether a complete base has arrived."""
        self._base: Reload | None = None
        if self.manager.device.type == "cpu":
            for kernels in self.manager.punica_wrapper_mapping.values():
                kernels.add_lora_linear = partial(add_adapter, kernels)
        self.begin()

    def begin(self) -> None:
        self.abandon()
        self.received: dict[str, str] = {}
        self.nbytes = 0
        self._factors: dict[str, dict[str, Tensor]] = {}

    @torch.no_grad()
    def take(self, bucket: Bucket) -> None:
        """Load a bucket's tensors. They are not used after this call."""
        base, factors = _split(bucket)
        if base.tensors:
            if self._base is None:
                self.has_base = False
                self._unwrap()
                self._base = Reload(self.model, self.model_config)
            self._base.take(base)
        self.received |= factors.received()
        self.nbytes += bucket.nbytes
        for name, tensor in factors.tensors:
            layer, factor = self._place(name)
            self._factors.setdefault(layer, {})[factor] = self._stored(factor, tensor)

    @torch.no_grad()
    def end(self) -> list[str]:
        """Use the adapters from now on. Returns names of tensors that did not arrive. If there are any, the model must
        not be sampled from."""
        missing: list[str] = []
        if self._base is not None:
            base, self._base = self._base, None
            try:
                missing = base.end()
            finally:
                self._wrap()
            self.received |= base.received
            self.has_base = not missing
        elif not self.has_base:
            missing = ["the weights of the base"]
        for layer, factors in self._factors.items():
            missing += [f"lora_{factor} of {layer}" for factor in ("A", "B") if factor not in factors]
        if not missing:
            self._install()
        return missing

    @torch.no_grad()
    def abandon(self) -> None:
        """End an unfinished load of the base."""
        base, self._base = self._base, None
        if base is not None:
            base.abandon()
        self._wrap()

    @torch.no_grad()
    def differing(self, bucket: Bucket) -> list[str]:
        """Names of the bucket's tensors whose values differ from the model's; empty if layers are split over
        workers."""
        if not self.has_whole_layers:
            return []
        base, factors = _split(bucket)
        with self._unwrapped():
            names = differing(self.model, base)
        for name, tensor in factors.tensors:
            path, factor = self._place(name)
            layer, part = self._layer(path)
            stacked = (layer.lora_a_stacked if factor == "A" else layer.lora_b_stacked)[part][0, 0]
            value = self._stored(factor, tensor)
            if not torch.equal(stacked[: len(value), : value.shape[1]], value):
                names.append(name)
        return names

    # ----------------------------------------------------------------------------- layers and factors

    def _place(self, name: str) -> tuple[str, str]:
        """(vLLM's name of the layer before packing, ``A`` | ``B``). Raises SyncError for a layer without adapters."""
        layer, _, rest = name.removeprefix(ADAPTER_PREFIX).partition(".lora_")
        path = self.names.renamed(f"{layer}.weight").removesuffix(".weight")
        if self._layer(path)[0] is None:
            raise SyncError(
                f"{name}: vLLM's {type(self.model).__name__} has no layer {path!r} that takes an adapter. Set "
                "sync.adapters = 'merged', or trainer.lora.targets to other layers."
            )
        return path, rest[0]

    def _layer(self, path: str) -> tuple[Any, int]:
        """(vLLM's layer with an adapter, index of the part)."""
        packed, part = self.names.packed(f"{path}.weight")
        return self.manager.modules.get(packed.removesuffix(".weight")), part or 0

    def _stored(self, factor: str, tensor: Tensor) -> Tensor:
        """The factor in the engine's number format, rounded once; B with the scale."""
        scale = self.adapters.scaling if factor == "B" else 1.0
        # A copy, because the memory of the bucket is used again for the next one.
        return (tensor.float() * scale).to(self.dtype, copy=True)

    def _install(self) -> None:
        layers = {}
        for path, factors in self._factors.items():
            a_RI, b_OR = factors["A"], factors["B"]
            self._require_shapes(path, a_RI, b_OR)
            layers[path] = LoRALayerWeights(path, len(a_RI), len(a_RI), a_RI, b_OR, 1.0)
        self.manager.remove_adapter(ADAPTER)
        self.manager.add_adapter(LoRAModel(ADAPTER, self.adapters.rank, layers))
        self.manager.activate_adapter(ADAPTER)
        self.manager._last_mapping = None  # values computed from it are gone after a sleep that discards weights

    def _require_shapes(self, path: str, a_RI: Tensor, b_OR: Tensor) -> None:
        """Check the shapes, because vLLM would silently accept a smaller matrix."""
        layer, part = self._layer(path)
        base = layer.base_layer
        outputs = base.output_sizes[part] if layer.n_slices > 1 else base.output_size
        expected = (self.adapters.rank, base.input_size), (outputs, self.adapters.rank)
        if (tuple(a_RI.shape), tuple(b_OR.shape)) != expected and (self.has_whole_layers or a_RI.shape != expected[0]):
            raise SyncError(
                f"the adapter of {path} has factors of shapes {tuple(a_RI.shape)} and {tuple(b_OR.shape)}; the layer "
                f"takes {expected[0]} and {expected[1]}. It is an adapter of another base, or of another rank."
            )

    @contextmanager
    def _unwrapped(self) -> Iterator[None]:
        self._unwrap()
        try:
            yield
        finally:
            self._wrap()

    def _unwrap(self) -> None:
        """Restore the model's own layers, whose names and packing a load of the base needs."""
        for path, layer in self.manager.modules.items():
            self._replace(path, layer.base_layer)

    def _wrap(self) -> None:
        for path, layer in self.manager.modules.items():
            self._replace(path, layer)

    def _replace(self, path: str, layer: Any) -> None:
        parent, _, name = path.rpartition(".")
        setattr(self.model.get_submodule(parent), name, layer)


def add_adapter(
    kernels: Any,
    y_NO: Tensor,
    x_NI: Tensor,
    a: Sequence[Tensor],
    b: Sequence[Tensor],
    scale: float,
    sizes: Sequence[int],
    **_: Any,
) -> None:
    """Add the adapter of a layer's parts to its output. Replaces vLLM's ``add_lora_linear``, which on a CPU copies both
    factors for each token. Here tokens have one adapter, or none.

    Args:
        kernels: vLLM's ``PunicaWrapperCPU``, which has the slot of each token, -1 for none.
        a, b: [slot, 1, R, I] and [slot, 1, O, R] of each part.
        sizes: number of outputs of each part.
    """
    start, uses_N1 = 0, (kernels._token_lora_indices[: len(x_NI), None] >= 0).to(x_NI.dtype)
    for a_part, b_part, size in zip(a, b, sizes, strict=True):
        z_NR = x_NI @ a_part[0, 0].t() * uses_N1
        y_NO[:, start : start + size].addmm_(z_NR, b_part[0, 0].t(), alpha=scale)
        start += size


def _split(bucket: Bucket) -> tuple[Bucket, Bucket]:
    """(the base's tensors, the adapters')."""
    pairs = list(zip(bucket.tensors, bucket.fingerprints, strict=True))
    parts = []
    for adapters in (False, True):
        chosen = [(t, mark) for t, mark in pairs if t[0].startswith(ADAPTER_PREFIX) == adapters]
        parts.append(Bucket(tuple(t for t, _ in chosen), tuple(mark for _, mark in chosen)))
    return parts[0], parts[1]
