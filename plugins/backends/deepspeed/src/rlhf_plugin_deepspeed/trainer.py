"""The trainer ``deepspeed``: one role's model over the ranks of a process group, by ZeRO stages 0 to 3."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, ClassVar

from rlhf.errors import CapabilityError, ConfigError
from rlhf.interfaces import Component, ModelSpec, TrainerFacts
from rlhf.interfaces.memory import FP32, ModelSize, TrainerMemory, TrainerWork
from rlhf.ops.batch import Batch
from rlhf.ops.heads import OutputHead
from rlhf.types import Head
from rlhf_hub.adapter_folders import adapter_of
from rlhf_modeling.arithmetic import arithmetic
from rlhf_modeling.images.architecture import is_image_text
from rlhf_modeling.kernels import check_liger
from rlhf_modeling.liger import use_liger
from rlhf_modeling.memory import trainer_memory
from rlhf_modeling.optimizer import build_optimizer
from rlhf_modeling.option_checks import LEARNING, check_training
from rlhf_modeling.precision import choose_device
from rlhf_modeling.pretrained import read_config
from rlhf_modeling.probe import probe
from rlhf_modeling.sharded.optimizer import DividedOrthogonalAdamW
from rlhf_modeling.sharded.process_group import collective
from rlhf_modeling.sharded.sequence_parallel import check_sequence_parallel, divide_rows, require_divisible
from rlhf_modeling.sharded.trainer import ShardedTrainer
from rlhf_modeling.storage import Storage, largest_matrix, whole_storage
from torch import Tensor

from rlhf_plugin_deepspeed.config import DeepSpeedTrainerConfig
from rlhf_plugin_deepspeed.engine import ZeroEngine
from rlhf_plugin_deepspeed.engine_module import EngineModule
from rlhf_plugin_deepspeed.loading import load
from rlhf_plugin_deepspeed.named_tensors import ZeroTensors
from rlhf_plugin_deepspeed.parallel_layers import check_sizes
from rlhf_plugin_deepspeed.process_group import import_deepspeed, join_group
from rlhf_plugin_deepspeed.tensor_split import TensorSplit
from rlhf_plugin_deepspeed.topology import Topology, check_parts
from rlhf_plugin_deepspeed.zero_partition import ZeroPartition

COPIES = {"cpu": 3, "cuda": 1}
"""Number of copies of a bucket of weights that stage 3 gathers. gloo has its own copy and gathers the next bucket
early."""


class DeepSpeedTrainer(ShardedTrainer):
    """ZeRO stages 0 to 3, with AdamW or Muon; bf16 is autocast. Weights in bf16 have fp32 masters, which are divided
    like the optimizer's state. The results equal those of the trainer ``torch``, on any number of ranks. Frozen roles
    hold only weights; in stage 3 each rank holds a part of them."""

    name = "deepspeed"
    source = "ZeRO: Rajbhandari et al. 2020 (arXiv:1910.02054)"
    Config = DeepSpeedTrainerConfig
    capabilities: ClassVar[frozenset[str]] = frozenset(
        {"ranks:many", "ema", "bf16", "fp32", "storage:bf16", "resume:exact", "images"}
    )
    memory_options: ClassVar[tuple[Mapping[str, Any], ...]] = (
        {"stage": 2},
        {"stage": 3},
        {"stage": 3, "offload_optimizer": "cpu"},
        {"stage": 3, "offload_optimizer": "cpu", "offload_params": "cpu"},
    )
    training_options: ClassVar[frozenset[str]] = LEARNING | {"export_shard_bytes"}
    changeable: ClassVar[frozenset[str]] = frozenset({"lr"})
    """Without ``offload_optimizer``, which ``offload_params`` requires."""
    layout: ClassVar[frozenset[str]] = ShardedTrainer.layout | {
        "stage", "tensor_parallel", "offload_optimizer", "offload_params", "hpz_partition_size", "keep_whole",
        "gathered", "bucket",
    }  # fmt: skip
    config: DeepSpeedTrainerConfig
    topology: Topology
    split: TensorSplit
    tensors: ZeroTensors
    partition: ZeroPartition
    zero: ZeroEngine | None = None
    """None if the role is neither trained nor divided by stage 3."""

    @classmethod
    def check(cls, config: Any, spec: ModelSpec, device: str | None) -> None:
        check_training(config, spec, config.device, device)
        check_parts(spec, config.tensor_parallel)
        check_sequence_parallel(spec, config.sequence_parallel)
        if spec.storage == "bf16" and spec.role.trained and config.stage < 2:
            raise CapabilityError(
                f"storage = 'bf16' of the trained role {spec.role.name!r} needs stage 2 or 3, got stage = "
                f"{config.stage}: DeepSpeed would add up the gradients of micro-batches in bf16. Stage 2 on one rank "
                "divides nothing and takes the same memory."
            )
        if spec.world_size % config.hpz_partition_size:
            raise CapabilityError(
                f"hpz_partition_size = {config.hpz_partition_size} does not divide the {spec.world_size} ranks of role "
                f"{spec.role.name!r}: use a divisor, preferably the number of ranks of one node, or 1 for no second "
                "copy"
            )
        if config.tensor_parallel > 1 and is_image_text(spec):
            raise CapabilityError(
                f"tensor_parallel = {config.tensor_parallel} divides models of text, but role {spec.role.name!r} has "
                "an image-text model. Set tensor_parallel = 1, with stage = 3 to divide the model."
            )
        _check_host_gradients(config, spec, device)
        if config.stage == 3 and adapter_of(spec.path) is not None:
            raise ConfigError(
                f"the model {spec.path!r} of role {spec.role.name!r} is an adapter, which stage = 3 cannot load: no "
                f"rank has whole weights. Use another stage, or merge it: rlhf merge {spec.path} NEW_FOLDER"
            )
        if config.tensor_parallel > 1:
            settings = read_config(spec)
            check_sizes(settings, " or ".join(settings.architectures or [spec.path]), config.tensor_parallel)

    @classmethod
    def memory(  # type: ignore[override]  # a component gets its own Config
        cls, config: DeepSpeedTrainerConfig, spec: ModelSpec, size: ModelSize, work: TrainerWork, device: str
    ) -> TrainerMemory:
        divided = storage(config, spec, size, device)
        computed = arithmetic(config, spec, size, work, device, config.tensor_parallel, config.sequence_parallel)
        if config.stage == 3:  # layers keep their weight for the backward pass, not its cast; only Liger's kernels
            computed = replace(computed, casts=False, fused=config.kernels == "liger")
        return trainer_memory(divided, computed, config, spec, size, work)

    def __init__(self, config: DeepSpeedTrainerConfig | None, spec: ModelSpec) -> None:
        Component.__init__(self, config)
        trained, divided = spec.role.trained, self.config.stage == 3
        device = choose_device(self.config.device)
        self.check(self.config, spec, device.type)
        deepspeed = import_deepspeed(device)
        join_group(spec, device, self.config.timeout)
        self.topology = Topology(spec, self.config.tensor_parallel, self.config.timeout)
        with collective(spec, "__init__", self.config.timeout):
            model, self.split = load(spec, device, self.config, deepspeed, self.topology)
        self.prepare(model, spec, device)
        self.tensors = ZeroTensors(self.module, self.split)
        self.packed = EngineModule(model, self.config)
        self._values: dict[str, Tensor] = {}  # outputs of the current micro-batch
        with self._guard("__init__"):
            if trained:
                self.base = build_optimizer(
                    self.parameters, self.tensors.shapes, model.outer_ids, self.config, DividedOrthogonalAdamW
                )
            if trained or divided:
                self.zero = ZeroEngine(self.packed, self.base, self.config, self.topology, device, spec.storage)
            # Stage 3 gathers weights in the engine's hooks, so only now can the model be computed.
            if divided:
                probe(model, spec)
                self.choose_kernel()
            if trained or divided:
                self._compute_together(divided)
            if divided and self.config.kernels == "liger":  # weights are gathered during calls from here on
                check_liger(model, use_liger(self.module), self.precision.bf16)
            require_divisible(model, self.config.sequence_parallel)
            divide_rows(model, spec, self.config.sequence_parallel, self.config.timeout)
            names = {p: name for name, p in self.parameters.items()}
            self.partition = ZeroPartition(
                self.config.stage, self.zero and self.zero.optimizer, names, spec.rank, trained
            )
        self.prepare_steps()

    def facts(self) -> TrainerFacts:
        facts = super().facts()
        return replace(facts, ranks_per_share=self.topology.parts * facts.ranks_per_share)

    # ------------------------------------------------------------------------------------- forward

    def _outputs(self, batch: Batch, resolved: Sequence[Head]) -> dict[str, Tensor]:
        bf16 = self.precision.bf16
        if self.zero is None:
            return self.packed(batch, resolved, bf16)
        self._values = self.zero.forward(batch, resolved, bf16=bf16)
        return self._values

    def _backward(self, total: Tensor, last: bool) -> None:
        assert self.zero is not None
        self.zero.backward(self._to_backward(total, self._values), self.precision.bf16)
        self._values = {}

    # ---------------------------------------------------------------------------------------- step

    def _reduce(self) -> None:
        assert self.zero is not None
        if not self.zero.reduced:
            self.zero.reduce()
            self.split.agree(self.partition)

    def _take_step(self) -> None:
        assert self.zero is not None
        self.zero.step()

    def _discard(self) -> None:
        assert self.zero is not None
        self.zero.discard()

    # ------------------------------------------------------------------------------------- weights

    def _stream(self, every_rank: bool, merge: bool) -> Iterator[tuple[str, Tensor]]:
        gather = self.zero.gathered if self.zero is not None and self.config.stage == 3 else None
        first, has_parts = self.spec.rank == 0 or every_rank, self.topology.replica == 0 or every_rank
        return self.tensors.stream_gathered(gather, first, has_parts, self.config.bucket, merge)

    def _full_tensor(self, name: str) -> Tensor:
        if self.zero is None or self.config.stage < 3:
            return super()._full_tensor(name)
        with self.zero.gathered([self.parameters[name]]):
            return self.parameters[name].detach().clone()

    def lend_head(self, view: str = "live") -> Iterator[OutputHead]:
        """In stages 0 to 2 the live head shares memory with the model; otherwise it is a copy."""
        head = None
        with self._guard("lend_head"), self._view(view), self._head_gathered():
            if self.spec.rank == 0:
                head = self.loaded_model.output_head
                if self.config.stage == 3 or view != "live":
                    bias_V = None if head.bias_V is None else head.bias_V.clone()
                    head = replace(head, weight_VH=head.weight_VH.clone(), bias_V=bias_V)
        if head is not None:
            yield head

    def _head_gathered(self) -> AbstractContextManager[Any]:
        if self.zero is None or self.config.stage < 3:
            return nullcontext()
        return self.zero.gathered(list(self.loaded_model.head.parameters()))

    def _offload_optimizer(self) -> None:
        assert self.zero is not None
        self.zero.offload()

    def _reload_optimizer(self) -> None:
        assert self.zero is not None
        self.zero.reload()

    @property
    def _average_on_device(self) -> bool:
        return self.config.offload_optimizer == "none"

    # --------------------------------------------------------------------------------------- state

    def division(self) -> dict[str, Any]:
        return {"stage": self.config.stage, "tensor_parallel": self.topology.parts}


def _check_host_gradients(config: DeepSpeedTrainerConfig, spec: ModelSpec, device: str | None) -> None:
    """Raises CapabilityError if ranks on GPUs would exchange gradients that are in host memory, which NCCL refuses."""
    on_gpus = device == "cuda" and config.device != "cpu" and spec.world_size > 1
    if not (on_gpus and spec.role.trained and config.offload_optimizer != "none"):
        return
    if config.tensor_parallel > 1 or config.optimizer == "muon":
        option = "optimizer = 'muon'" if config.optimizer == "muon" else f"tensor_parallel = {config.tensor_parallel}"
        raise CapabilityError(
            f"offload_optimizer = {config.offload_optimizer!r} keeps the gradients of role {spec.role.name!r} in host "
            f"memory, but {option} exchanges them between its {spec.world_size} ranks, and NCCL exchanges memory of "
            "GPUs only. Remove one of the two options."
        )


def storage(config: DeepSpeedTrainerConfig, spec: ModelSpec, size: ModelSize, device: str) -> Storage:
    """Memory of a rank in each ZeRO stage, as :mod:`rlhf_plugin_deepspeed.engine` allocates it.

    fp32 weights are updated in place; only an optimizer on the host has a separate copy. Weights in bf16 always have
    fp32 masters, divided like the optimizer's state. On a CPU, host memory is device memory.

    Muon computes one whole matrix per rank at a time: its fp32 momentum, and a few copies on the rank that works on it.
    """
    parts = config.tensor_parallel
    check_parts(spec, parts)
    stage, ranks, host = config.stage, spec.world_size // parts, config.offload_optimizer != "none"
    trained, on_cpu, muon = spec.role.trained, device == "cpu", config.optimizer == "muon"
    base, bf16 = whole_storage(config, device, size, spec.storage), spec.storage == "bf16"
    over = ranks if stage >= 1 else 1
    common = replace(
        base,
        layer_ranks=parts,
        frees_gradients=False,
        optimizer_ranks=over,
        optimizer_bytes=base.optimizer_bytes + (FP32 if host and not bf16 else 0.0),
        step=int(FP32 * size.matrices / over) + (spec.world_size + 2) * largest_matrix(size) if muon else 0,
        host_optimizer=host and not on_cpu,
        offloads=device == "cuda" and not host,
        making_bytes=_making(stage, ranks, on_cpu, host, base.weight_bytes),
        buffers=int(config.bucket * FP32) if trained and (ranks > 1 or stage >= 1) else 0,
    )
    if stage == 1:  # whole gradients, then this rank's part twice: reduced, and flattened for the step
        return replace(common, gradient_bytes=max(FP32, 2 * FP32 / ranks))
    if stage == 2:  # this rank's part of the last micro-batch, and of the sum of those before it
        return replace(common, gradient_ranks=ranks, gradient_bytes=2 * FP32)
    if stage == 3:  # a gradient buffer that stays
        copied = config.bucket * COPIES[device] if ranks > 1 else 0
        weights = min(size.parameters, config.gathered + size.widest)
        return replace(
            common,
            weight_ranks=ranks,
            read_bytes=FP32,  # rounded afterwards (:mod:`rlhf_plugin_deepspeed.loading`)
            gradient_ranks=ranks,
            keeps_gradients=True,
            second_ranks=config.hpz_partition_size if config.hpz_partition_size > 1 else 0,
            host_weights=config.offload_params != "none" and not on_cpu,
            gathered=int((weights + copied) * base.weight_bytes) if ranks > 1 or config.offload_params != "none" else 0,
        )
    return common


def _making(stage: int, ranks: int, on_cpu: bool, host: bool, weight: float) -> float:
    """Bytes per trained parameter that exist only while the engine is created. Stages 1 and 2 copy the weights into one
    buffer (on a GPU through the host), and this rank's part for the optimizer. Stage 3 copies its part. An optimizer on
    the host has further copies."""
    part = FP32 / ranks
    if stage in (1, 2):
        return weight + (part if host else 0) if on_cpu else part
    if stage == 3:
        return part * (3 if host and on_cpu else 1)
    return 0.0
