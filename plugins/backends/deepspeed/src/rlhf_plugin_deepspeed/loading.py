"""Reads a model in one of three ways: whole; divided over ranks while it is read, so that no rank ever holds all of it
(stage 3); or whole in host memory, after which each rank keeps its part of every layer (``tensor_parallel``)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from rlhf.interfaces import ModelSpec
from rlhf_modeling.config import LoraOptions
from rlhf_modeling.kernels import use_kernels
from rlhf_modeling.loaded import LoadedModel
from rlhf_modeling.model import adapt, draw_head, load_model, read_model
from rlhf_modeling.precision import precision_of
from rlhf_modeling.sharded.loading import load_on_host

from rlhf_plugin_deepspeed.config import DeepSpeedTrainerConfig
from rlhf_plugin_deepspeed.engine import engine_config
from rlhf_plugin_deepspeed.parallel_layers import divide
from rlhf_plugin_deepspeed.process_group import quiet, second_copies
from rlhf_plugin_deepspeed.tensor_split import TensorSplit
from rlhf_plugin_deepspeed.topology import Topology


class _Zero3:
    """The object that transformers expects as its caller's DeepSpeed config."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config

    def is_zero3(self) -> bool:
        return True


@contextmanager
def _transformers_divides(config: dict[str, Any]) -> Iterator[None]:
    """Context in which transformers creates every parameter under ``deepspeed.zero.Init`` and fills one at a time."""
    from transformers.integrations.deepspeed import set_hf_deepspeed_config, unset_hf_deepspeed_config

    facts = _Zero3(config)  # transformers keeps a weak reference
    set_hf_deepspeed_config(facts)
    try:
        yield
    finally:
        unset_hf_deepspeed_config()
        del facts


def load(
    spec: ModelSpec, device: torch.device, config: DeepSpeedTrainerConfig, deepspeed: Any, topology: Topology
) -> tuple[LoadedModel, TensorSplit]:
    """Load this rank's part of the model."""
    if config.stage == 3:
        return load_divided(spec, device, config, deepspeed), TensorSplit(topology)
    if topology.parts > 1:
        return load_part(spec, device, config, topology)
    adapters, deterministic = _adapters(spec, config), config.deterministic
    model = load_model(spec, device, adapters, config.quantization, kernels=config.kernels, deterministic=deterministic)
    return model, TensorSplit(topology)


def _adapters(spec: ModelSpec, config: DeepSpeedTrainerConfig) -> LoraOptions | None:
    return config.lora if spec.role.trained else None


def load_part(
    spec: ModelSpec, device: torch.device, config: DeepSpeedTrainerConfig, topology: Topology
) -> tuple[LoadedModel, TensorSplit]:
    """Load the whole model in host memory and keep this rank's part. ``device`` never holds more."""
    model = load_on_host(spec, device, _adapters(spec, config), config.kernels)
    split = divide(model, topology, device)
    if config.kernels == "liger":
        use_kernels(model, "liger", precision_of(spec, device).bf16)
    return model, split


def _round(module: Any) -> None:
    """Store this rank's part of every parameter in bf16. DeepSpeed could read the parameters in bf16, but it would also
    round everything that is computed meanwhile, such as the frequencies of rotary embeddings."""
    for parameter in module.parameters():
        parts = (parameter, parameter.ds_tensor, getattr(parameter, "ds_secondary_tensor", None))
        for part in parts:
            if part is not None:
                part.data = part.data.bfloat16()


def load_divided(spec: ModelSpec, device: torch.device, config: DeepSpeedTrainerConfig, deepspeed: Any) -> LoadedModel:
    """:func:`rlhf_modeling.model.load_model` for stage 3. It is not probed yet."""
    copies = second_copies(config.hpz_partition_size, config.timeout)
    # The number of parameters is not known yet. It would only limit the size of the buckets.
    divided = engine_config(config, 2**62)
    with quiet(), copies, _transformers_divides(divided):
        model = read_model(spec)
        model.module.eval().to(device)
    if model.fresh_head:
        with deepspeed.zero.GatheredParameters(list(model.head.parameters()), modifier_rank=0):
            if spec.rank == 0:
                draw_head(model, spec)
    if spec.storage == "bf16":
        _round(model.module)
    if (lora := _adapters(spec, config)) is not None:
        with _transformers_divides(divided):  # so peft gathers a weight whose row lengths DoRA needs
            adapt(model, spec, lora, device)
        model.module.eval().to(device)
    return model
