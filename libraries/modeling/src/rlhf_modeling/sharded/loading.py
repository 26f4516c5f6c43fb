"""Reading a model whole in host memory, before each rank keeps its part."""

from __future__ import annotations

import torch
from rlhf.interfaces import ModelSpec

from rlhf_modeling.config import Kernels, LoraOptions
from rlhf_modeling.kernels import use_kernels
from rlhf_modeling.loaded import LoadedModel
from rlhf_modeling.model import adapt, draw_head, read_model
from rlhf_modeling.probe import probe


def load_on_host(spec: ModelSpec, device: torch.device, lora: LoraOptions | None, kernels: Kernels) -> LoadedModel:
    """:func:`rlhf_modeling.model.load_model` in host memory, the same on every rank, for a role that will compute on
    ``device``. The caller handles Liger's kernels; ``auto`` is ``own`` if the layers are known."""
    model = read_model(spec, merge=lora is None)
    if model.fresh_head:
        draw_head(model, spec)
    probe(model, spec)
    if lora is not None:
        adapt(model, spec, lora, device)
        model.module.eval()
    use_kernels(model, kernels if kernels != "liger" else "none")
    return model
