"""Memory of a rank, for ``rlhf plan``."""

from __future__ import annotations

from dataclasses import replace

from rlhf.interfaces import ModelSpec
from rlhf.interfaces.memory import FP32, ModelSize
from rlhf_modeling.storage import Storage, largest_matrix, whole_storage

from rlhf_plugin_fsdp.config import FsdpTrainerConfig

COPIES = {"cpu": 2, "cuda": 1}
"""Copies of a group of weights while it is gathered, besides the parameters. gloo has one of its own."""


def storage(config: FsdpTrainerConfig, spec: ModelSpec, size: ModelSize, device: str) -> Storage:
    """Weights, gradients and optimizer state are divided over all ranks.

    While a rank computes it holds: the root (everything outside of layers) whole; one layer whole, or all layers
    (``reshard_after_forward = false``); the buffers of the last gathering; in training the gradient of the root, or of
    a layer, and the buffer that is reduced.

    Trained weights that are stored in bf16 are kept as their fp32 masters only (:mod:`rlhf_plugin_fsdp.layers`), and
    gathered in bf16, as frozen ones are; beside adapters few weights have masters. Gradients are reduced in fp32.
    """
    ranks, trained, bf16 = spec.world_size, spec.role.trained, spec.storage == "bf16"
    sent = 2.0 if bf16 else FP32
    adapters = trained and config.lora is not None
    layer = max(x.parameters for x in size.layers)
    layers = sum(x.parameters for x in size.layers)
    root = size.parameters - layers
    copies = COPIES[device]
    whole = max((1 + copies) * root, root + (layer if config.reshard_after_forward else layers) + copies * layer)
    reduced = max(root, layer) if trained and not adapters else 0
    muon = config.optimizer == "muon"
    own = whole_storage(config, device, size)
    return replace(
        own,
        weight_bytes=FP32 if trained and not adapters else sent,
        optimizer_bytes=own.optimizer_bytes + (FP32 - sent if adapters else 0),
        weight_ranks=ranks,
        gradient_ranks=ranks,
        optimizer_ranks=ranks,
        whole_at_load=True,
        frees_gradients=False,
        gathered=int(whole * sent + reduced * (sent + FP32)) if ranks > 1 else 0,
        step=int(FP32 * size.matrices / ranks) + (ranks + 2) * largest_matrix(size) if muon else 0,
    )
