"""Loads new weights into a running vLLM model, layer by layer. A load is complete or refused.

vLLM repacks weights for its kernels after loading, so new weights cannot be copied in place. Its layerwise reload
restores a layer's parameters to their state before packing, collects the new tensors, and packs the layer when all of
them have arrived.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from rlhf.errors import SyncError, short_list
from rlhf.weights.bucket import Bucket
from torch import Tensor, nn
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.reload.layerwise import (
    finalize_layerwise_reload,
    get_layerwise_info,
    initialize_layerwise_reload,
)

from rlhf_plugin_vllm.worker.quantized import QuantisedLayers
from rlhf_plugin_vllm.worker.tensor_names import TensorNames


class Reload:
    """One load of all weights into a worker's model: buckets by :meth:`take`, then :meth:`end` or :meth:`abandon`."""

    def __init__(self, model: nn.Module, model_config: Any) -> None:
        self.model: Any = model  # vLLM's, with its own load_weights
        self.model_config = model_config
        self.names = TensorNames(model)
        packed = [name for name, _ in model.named_parameters()]  # a tied parameter is named once
        self.tied = list(tied_heads(model))
        self.received: dict[str, str] = {}
        """{name as the trainer sent it: fingerprint of the received bytes}."""
        self.loaded_names: set[str] = set()
        """vLLM's names of parameters that were loaded, wholly or partly."""
        self.nbytes = 0
        # Before the next line, which moves the weights to the device `meta`.
        self.quantised = QuantisedLayers(model, self.names)
        initialize_layerwise_reload(model)
        parameters = dict(model.named_parameters())  # without the scales of quantised weights, which are computed here
        self.needed = [name for name in packed if name in parameters]

    @torch.no_grad()
    def take(self, bucket: Bucket) -> None:
        """Load a bucket's tensors. They are not used after this call.

        Raises SyncError for a tensor that the model does not have, or of another shape.
        """
        with ThreadPoolExecutor(1) as executor:  # hashing releases the interpreter lock
            marks = executor.submit(_fingerprints, bucket, _stream(bucket))
            try:
                loaded_names = self.model.load_weights(iter(bucket.tensors))
            except Exception as error:
                names = [name for name, _ in bucket.tensors]
                raise SyncError(
                    f"vLLM cannot load one of the received tensors {short_list(names, 8)} ({type(error).__name__}: "
                    f"{error}). The generator's model is not the policy's."
                ) from error
            self.received |= marks.result()
        self.loaded_names |= set(loaded_names or ())
        self.quantised.add(bucket)
        self.nbytes += bucket.nbytes
        self._keep(bucket)

    def _keep(self, bucket: Bucket) -> None:
        """Copy tensors that a layer keeps until its other tensors arrive, because the bucket's memory will be
        reused."""
        passing = {tensor.untyped_storage().data_ptr() for _, tensor in bucket.tensors}
        for layer in self.model.modules():
            for _, bound in get_layerwise_info(layer).loaded_weights:
                for key, value in bound.arguments.items():
                    if key != "param" and isinstance(value, Tensor) and value.untyped_storage().data_ptr() in passing:
                        bound.arguments[key] = value.clone()

    @torch.no_grad()
    def end(self) -> list[str]:
        """Pack the layers that are not packed yet.

        Returns:
            Names, as the trainer sent them, of tensors that the model needs but that did not arrive. If there are any,
                the model must not be sampled from.

        Raises SyncError if a quantised layer computes with other weights than the received ones.
        """
        # Before abandon(), after which vLLM no longer knows how much of a layer was loaded.
        missing = self.names.missing(self.needed, self.loaded_names, self.received)
        if not missing:
            missing = [f"a part of {name}" for name in self._unfinished()]
        self.abandon()
        if not missing:
            repack_tied(self.tied)
            self.quantised.check()
        return missing

    def _unfinished(self) -> Iterator[str]:
        """vLLM's names of incompletely loaded layers. Padded vocabularies are skipped. Buffers that no checkpoint
        contains, such as the positions in CLIP's embeddings, are not counted."""
        for name, layer in self.model.named_modules():
            info = get_layerwise_info(layer)
            padded = isinstance(layer, VocabParallelEmbedding)
            computed_buffers = [layer._buffers[buffer] for buffer in layer._non_persistent_buffers_set]
            total = (info.load_numel_total or 0) - sum(b.numel() for b in computed_buffers if b is not None)
            if info.can_load() and not padded and 0 < info.load_numel < total:
                yield name

    @torch.no_grad()
    def abandon(self) -> None:
        """End vLLM's reload, whatever was loaded. The model can then be reloaded."""
        finalize_layerwise_reload(self.model, self.model_config)


def _stream(bucket: Bucket) -> torch.cuda.Stream | None:
    """This thread's stream, on which the tensors were computed and are loaded; None if they are on the host."""
    device = next((tensor.device for _, tensor in bucket.tensors if tensor.is_cuda), None)
    return None if device is None else torch.cuda.current_stream(device)


def _fingerprints(bucket: Bucket, stream: torch.cuda.Stream | None) -> dict[str, str]:
    """See :meth:`Bucket.received`. A thread starts on the default stream, which does not wait for others."""
    with torch.cuda.stream(stream):  # None: nothing changes
        return bucket.received()


def tied_heads(model: nn.Module) -> Iterator[nn.Module]:
    """Layers that share the weight of another layer."""
    weight_ids: set[int] = set()
    for layer in model.modules():
        weight = layer._parameters.get("weight")
        if weight is None:
            continue
        if id(weight) in weight_ids:
            yield layer
        weight_ids.add(id(weight))


def repack_tied(layers: list[nn.Module]) -> None:
    """Pack tied heads again. They receive no tensor, so vLLM does not pack them, and their kernels would keep the old
    weights."""
    for layer in layers:
        method = getattr(layer, "quant_method", None)
        if method is not None:
            method.process_weights_after_loading(layer)
