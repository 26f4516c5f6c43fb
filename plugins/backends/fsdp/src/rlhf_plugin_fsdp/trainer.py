"""The trainer ``fsdp``: one role's model divided over the ranks of a process group by PyTorch FSDP2."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from pydantic import model_validator
from rlhf.interfaces import Component, Loss, ModelSpec, Sums
from rlhf.interfaces.memory import FP32, ModelSize, TrainerMemory, TrainerWork
from rlhf.ops.batch import Batch
from rlhf.ops.heads import OutputHead
from rlhf.types import Head
from rlhf_modeling.arithmetic import arithmetic
from rlhf_modeling.memory import trainer_memory
from rlhf_modeling.optimizer import build_optimizer, to_device, to_host
from rlhf_modeling.option_checks import LEARNING, check_training
from rlhf_modeling.precision import choose_device
from rlhf_modeling.sharded.config import ShardedConfig
from rlhf_modeling.sharded.loading import load_on_host
from rlhf_modeling.sharded.optimizer import DividedOrthogonalAdamW
from rlhf_modeling.sharded.partition import Replicas, Split
from rlhf_modeling.sharded.process_group import collective, join
from rlhf_modeling.sharded.sequence_parallel import check_sequence_parallel, divide_rows, require_divisible
from rlhf_modeling.sharded.trainer import ShardedTrainer
from rlhf_modeling.storage import Storage, largest_matrix, whole_storage
from rlhf_modeling.stored import DTYPES
from torch import Tensor

from rlhf_plugin_fsdp.layers import divide, sparing_linear
from rlhf_plugin_fsdp.local_parts import DividedTensors, LocalParts, gathered, return_pages

COPIES = {"cpu": 2, "cuda": 1}
"""Number of copies of a group of weights while it is gathered, besides the parameters. gloo has a copy of its own."""


class FsdpTrainerConfig(ShardedConfig):
    reshard_after_forward: bool = True
    """Free a layer's gathered weights after its forward pass and gather them again for its backward pass. ``false``
    gathers once per micro-batch and holds all weights whole until the backward pass."""

    @model_validator(mode="after")
    def _possible(self) -> FsdpTrainerConfig:
        if self.kernels == "liger":
            raise ValueError(
                "kernels = 'liger' cannot be combined with trainer 'fsdp': the comparison with transformers' layers "
                "needs a whole model on the GPU. Remove kernels, or use trainer 'deepspeed'"
            )
        if (option := self.quantizes) is not None:
            raise ValueError(
                f"{option} cannot be combined with trainer 'fsdp', which divides weights: a quantised weight is whole "
                "on every rank. Remove the option, or use trainer 'torch', or 'deepspeed' with stage 0, 1 or 2"
            )
        return self


class FsdpTrainer(ShardedTrainer):
    """fp32 weights, gradients and optimizer state, all divided over the ranks, with AdamW or Muon; bf16 is autocast.
    For trained weights that are stored in bf16, the ranks hold the fp32 masters and gather bf16. The results equal
    those of the trainer ``torch``, on any number of ranks. Frozen roles are divided too."""

    name = "fsdp"
    source = "FSDP: Zhao et al. 2023 (arXiv:2304.11277), as torch.distributed.fsdp.fully_shard"
    Config = FsdpTrainerConfig
    capabilities: ClassVar[frozenset[str]] = frozenset(
        {"ranks:many", "ema", "bf16", "fp32", "storage:bf16", "resume:exact", "images"}
    )
    memory_options: ClassVar[tuple[Mapping[str, Any], ...]] = ({"reshard_after_forward": True},)
    layout: ClassVar[frozenset[str]] = ShardedTrainer.layout | {"reshard_after_forward"}
    training_options: ClassVar[frozenset[str]] = LEARNING | {"export_shard_bytes"}
    changeable: ClassVar[frozenset[str]] = frozenset({"lr"})
    config: FsdpTrainerConfig
    tensors: DividedTensors
    partition: LocalParts

    @classmethod
    def check(cls, config: Any, spec: ModelSpec, device: str | None) -> None:
        check_training(config, spec, config.device, device)
        check_sequence_parallel(spec, config.sequence_parallel)

    @classmethod
    def memory(  # type: ignore[override]  # a component gets its own Config
        cls, config: FsdpTrainerConfig, spec: ModelSpec, size: ModelSize, work: TrainerWork, device: str
    ) -> TrainerMemory:
        divided = storage(config, spec, size, device)
        computed = replace(arithmetic(config, spec, size, work, device, parts=config.sequence_parallel), casts=False)
        return trainer_memory(divided, computed, config, spec, size, work)

    def __init__(self, config: FsdpTrainerConfig | None, spec: ModelSpec) -> None:
        Component.__init__(self, config)
        trained = spec.role.trained
        device = choose_device(self.config.device)
        self.check(self.config, spec, device.type)
        join(spec, device, self.config.timeout)
        with collective(spec, "__init__", self.config.timeout):
            lora = self.config.lora if trained else None
            model = load_on_host(spec, device, lora, self.config.kernels)
            require_divisible(model, self.config.sequence_parallel)
            self.prepare(model, spec, device)
            # Names and formats are noted before divide(), which replaces the parameters and stores masters in fp32.
            outer = {name for name, p in self.parameters.items() if id(p) in model.outer_ids}
            stored = {name for name, p in self.parameters.items() if trained and p.dtype == torch.bfloat16}
            divide(self.packed, self.module, device.type, self.config.reshard_after_forward)
            divide_rows(model, spec, self.config.sequence_parallel, self.config.timeout)
        self._compute_together(divided=True)
        divided = dict(self.module.named_parameters())
        self.parameters = {name: divided[name] for name in self.parameters}
        self.split = Split(Replicas(spec.rank, spec.world_size))
        self.tensors = DividedTensors(self.module, self.split, stored)
        self.partition = LocalParts(self.parameters, self.packed, spec.rank, spec.world_size)
        if trained:
            owners = self.partition.owners
            outer_ids = {id(owners[name]) for name in outer}
            self.base = build_optimizer(owners, self.tensors.shapes, outer_ids, self.config, DividedOrthogonalAdamW)
        self.prepare_steps()

    # ------------------------------------------------------------------------------------- forward

    def forward(
        self, micros: Sequence[Batch], outputs: Sequence[str | Head], view: str = "live"
    ) -> list[dict[str, Tensor]]:
        try:
            return super().forward(micros, outputs, view)
        finally:
            self._free()

    def evaluate(self, micros: Sequence[Batch], loss: Loss, coef: Mapping[str, float], live: Mapping[str, str]) -> Sums:
        try:
            return super().evaluate(micros, loss, coef, live)
        finally:
            self._free()

    def _free(self) -> None:
        self.partition.publish()  # without a backward pass the weights would stay whole
        return_pages(self.device)

    def _outputs(self, batch: Batch, resolved: Sequence[Head]) -> dict[str, Tensor]:
        with sparing_linear(self.precision.bf16):
            self._values = super()._outputs(batch, resolved)
        return self._values

    def _backward(self, total: Tensor, last: bool) -> None:
        values, self._values = self._values, {}
        with sparing_linear(self.precision.bf16):  # layers may be recomputed
            self._to_backward(total, values).backward()
        return_pages(self.device)

    # ---------------------------------------------------------------------------------------- step

    def _reduce(self) -> None:
        """Nothing to do, because every backward pass reduces its gradients."""

    def _take_step(self) -> None:
        assert self.base is not None
        self.partition.give_gradients()
        self.base.step()
        self.partition.discard()
        return_pages(self.device)

    def _discard(self) -> None:
        self.partition.discard()

    # ------------------------------------------------------------------------------------- weights

    def _stream(self, every_rank: bool, merge: bool) -> Iterator[tuple[str, Tensor]]:
        return self.tensors.stream(self.spec.rank == 0 or every_rank, merge)

    def lend_head(self, view: str = "live") -> Iterator[OutputHead]:
        with self._guard("lend_head"), self._view(view):
            head, dtype = self.loaded_model.output_head, DTYPES[self.spec.storage]
            bias_V = None if head.bias_V is None else gathered(head.bias_V, dtype)
            head = replace(head, weight_VH=gathered(head.weight_VH, dtype), bias_V=bias_V)
        if self.spec.rank == 0:
            yield head

    def _offload_optimizer(self) -> None:
        assert self.base is not None
        for state in self.base.state.values():
            to_host(state)

    def _reload_optimizer(self) -> None:
        assert self.base is not None
        for state in self.base.state.values():
            to_device(state, self.device)


def storage(config: FsdpTrainerConfig, spec: ModelSpec, size: ModelSize, device: str) -> Storage:
    """Memory of a rank. Weights, gradients and optimizer state are divided over all ranks.

    During the computation a rank holds the whole root (everything outside of layers); one whole layer, or all layers
    (``reshard_after_forward = false``); the buffers of the last all-gather; in training the gradient of the root, or of
    a layer, and the buffer that is reduced.

    Trained weights that are stored in bf16 are kept only as fp32 masters (:mod:`rlhf_plugin_fsdp.layers`), and gathered
    in bf16, like frozen weights. With adapters only few weights have masters. Gradients are reduced in fp32.
    """
    ranks, trained, bf16 = spec.world_size, spec.role.trained, spec.storage == "bf16"
    wire_bytes = 2.0 if bf16 else FP32
    adapters = trained and config.lora is not None
    layer = max(x.parameters for x in size.layers)
    layers = sum(x.parameters for x in size.layers)
    root = size.parameters - layers
    copies = COPIES[device]
    full_weights = max((1 + copies) * root, root + (layer if config.reshard_after_forward else layers) + copies * layer)
    reduced = max(root, layer) if trained and not adapters else 0
    muon = config.optimizer == "muon"
    base = whole_storage(config, device, size)
    return replace(
        base,
        weight_bytes=FP32 if trained and not adapters else wire_bytes,
        optimizer_bytes=base.optimizer_bytes + (FP32 - wire_bytes if adapters else 0),
        weight_ranks=ranks,
        gradient_ranks=ranks,
        optimizer_ranks=ranks,
        whole_at_load=True,
        frees_gradients=False,
        gathered=int(full_weights * wire_bytes + reduced * (wire_bytes + FP32)) if ranks > 1 else 0,
        step=int(FP32 * size.matrices / ranks) + (ranks + 2) * largest_matrix(size) if muon else 0,
    )
