"""The trainer ``deepspeed``: one role's model over the ranks of a process group, by ZeRO stages 0 to 3."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from rlhf.errors import CapabilityError
from rlhf.interfaces import ApplyResult, Component, Loss, ModelSpec, Sums, TrainerFacts
from rlhf.interfaces.memory import ModelSize, TrainerMemory, TrainerWork
from rlhf.ops.batch import Batch
from rlhf.types import Head
from rlhf_modeling.checks import LEARNING, check_training
from rlhf_modeling.kernels import check_liger
from rlhf_modeling.liger import use_liger
from rlhf_modeling.memory import arithmetic, trainer_memory
from rlhf_modeling.optimizer import set_rates
from rlhf_modeling.precision import choose_device
from rlhf_modeling.pretrained import read
from rlhf_modeling.probe import probe
from rlhf_modeling.schedule import Schedule
from torch import Tensor
from transformers import AutoConfig

from rlhf_plugin_deepspeed import checkpoint, memory
from rlhf_plugin_deepspeed.config import DeepSpeedTrainerConfig
from rlhf_plugin_deepspeed.coverage import Coverage
from rlhf_plugin_deepspeed.engine import ZeroEngine
from rlhf_plugin_deepspeed.engine_module import EngineModule
from rlhf_plugin_deepspeed.loading import load
from rlhf_plugin_deepspeed.muon import DividedOrthogonalAdamW
from rlhf_plugin_deepspeed.named_tensors import NamedTensors
from rlhf_plugin_deepspeed.optimizer import build_optimizer
from rlhf_plugin_deepspeed.parallel_layers import check_sizes
from rlhf_plugin_deepspeed.process_group import (
    collective,
    first_text,
    import_deepspeed,
    join,
    largest,
    reduce_to_first,
    total,
)
from rlhf_plugin_deepspeed.sharded_ema import ShardedEma
from rlhf_plugin_deepspeed.sharded_trainer import ShardedTrainer
from rlhf_plugin_deepspeed.topology import Topology, check_parts
from rlhf_plugin_deepspeed.zero_partition import ZeroPartition, scale


class DeepSpeedTrainer(ShardedTrainer):
    """fp32 weights under ZeRO stages 0 to 3, with AdamW or Muon; bf16 is autocast. The numbers are those of the trainer
    ``torch``, on any number of ranks. Frozen roles hold weights only; in stage 3 each rank holds a part of them."""

    name = "deepspeed"
    source = "ZeRO: Rajbhandari et al. 2020 (arXiv:1910.02054)"
    Config = DeepSpeedTrainerConfig
    capabilities: ClassVar[frozenset[str]] = frozenset(
        {"ranks:many", "export:tensors", "lend:head", "ema", "bf16", "fp32", "resume:exact"}
    )
    lighter: ClassVar[tuple[Mapping[str, Any], ...]] = (
        {"stage": 2},
        {"stage": 3},
        {"stage": 3, "offload_optimizer": "cpu"},
        {"stage": 3, "offload_optimizer": "cpu", "offload_params": "cpu"},
    )
    learning: ClassVar[frozenset[str]] = LEARNING | {"export_shard_bytes"}
    changeable: ClassVar[frozenset[str]] = frozenset({"lr"})
    """Without ``offload_optimizer``, which ``offload_params`` requires."""
    config: DeepSpeedTrainerConfig

    @classmethod
    def check(cls, config: Any, spec: ModelSpec, device: str | None) -> None:
        check_training(config, spec, config.device, device)
        check_parts(spec, config.tensor_parallel)
        if spec.world_size % config.hpz_partition_size:
            raise CapabilityError(
                f"hpz_partition_size = {config.hpz_partition_size} does not divide the {spec.world_size} ranks of role "
                f"{spec.role.name!r}: use a divisor, at best the ranks of one node, or 1 for no second copy"
            )
        if config.tensor_parallel > 1:
            settings = read(spec, "model", AutoConfig.from_pretrained)
            check_sizes(settings, " or ".join(settings.architectures or [spec.path]), config.tensor_parallel)

    @classmethod
    def memory(  # type: ignore[override]  # a component gets its own Config
        cls, config: DeepSpeedTrainerConfig, spec: ModelSpec, size: ModelSize, work: TrainerWork, device: str
    ) -> TrainerMemory:
        storage = memory.storage(config, spec, size, device)
        computed = arithmetic(config, spec, size, work, device, config.tensor_parallel)
        if config.stage == 3:  # layers keep their weight for the backward pass, not its cast; Liger's kernels only
            computed = replace(computed, casts=False, fused=config.kernels == "liger")
        targets = config.lora.targets if config.lora is not None else None
        return trainer_memory(storage, computed, size, work, trained=spec.role.trained, adapter_targets=targets)

    def __init__(self, config: DeepSpeedTrainerConfig | None, spec: ModelSpec) -> None:
        Component.__init__(self, config)
        trained, divided = spec.role.trained, self.config.stage == 3
        device = choose_device(self.config.device)
        self.check(self.config, spec, device.type)
        deepspeed = import_deepspeed(device)
        join(spec, device, self.config.timeout)
        self.topology = Topology(spec, self.config.tensor_parallel, self.config.timeout)
        with collective(spec, "__init__", self.config.timeout):
            loaded, self.split = load(spec, device, self.config, deepspeed, self.topology)
        self.prepare(loaded, spec, device)
        self.tensors = NamedTensors(self.module, self.split)
        self.packed = EngineModule(loaded, self.config)
        self._values: dict[str, Tensor] = {}  # outputs of the current micro-batch
        with self._guard("__init__"):
            if trained:
                self.schedule = Schedule(self.config, spec.total_updates)
                outside = {id(p) for m in (self.module.get_input_embeddings(), loaded.head) for p in m.parameters()}
                self.base = build_optimizer(self.parameters, self.tensors.shapes, outside, self.config)
            if trained or divided:
                self.zero = ZeroEngine(self.packed, self.base, self.config, self.topology, device)
            if divided:
                probe(loaded, spec)
                self.require_packing()
                if loaded.layout == "alone" or loaded.rope is not None:  # ranks must call layers equally often
                    loaded.most_calls = self._most_calls
            if divided and self.config.kernels == "liger":  # weights are gathered during calls from here on
                check_liger(loaded, use_liger(self.module))
            names = {p: name for name, p in self.parameters.items()}
            self.partition = ZeroPartition(
                self.config.stage, self.zero and self.zero.optimizer, names, spec.rank, trained
            )
        if isinstance(self.base, DividedOrthogonalAdamW):
            self.base.bind(self.partition, self.tensors.shapes, self.split)
        if trained and self.config.ema_decay is not None:
            self.average = ShardedEma(self.partition, self.config.ema_decay)

    def _most_calls(self, calls: int) -> int:
        return int(largest(torch.tensor([calls], device=self.device))[0])

    def facts(self) -> TrainerFacts:
        return replace(super().facts(), ranks_per_share=self.topology.parts)

    # ------------------------------------------------------------------------------------- forward

    def forward(
        self, micros: Sequence[Batch], outputs: Sequence[str | Head], view: str = "live"
    ) -> list[dict[str, Tensor]]:
        with self._guard("forward"):
            return super().forward(micros, outputs, view)

    def accumulate(
        self, micros: Sequence[Batch], loss: Loss, coef: Mapping[str, float], live: Mapping[str, str]
    ) -> Sums:
        with self._guard("accumulate"):
            return super().accumulate(micros, loss, coef, live)

    def evaluate(self, micros: Sequence[Batch], loss: Loss, coef: Mapping[str, float], live: Mapping[str, str]) -> Sums:
        with self._guard("evaluate"):
            return super().evaluate(micros, loss, coef, live)

    def _outputs(self, batch: Batch, resolved: Sequence[Head]) -> dict[str, Tensor]:
        bf16 = self.precision.bf16
        if self.zero is None:
            return self.packed(batch, resolved, bf16)
        self._values = self.zero.forward(batch, resolved, bf16=bf16)
        return self._values

    def _backward(self, total: Tensor, last: bool) -> None:
        """Every rank must call every backward pass. A rank whose loss is not finite calls it with a loss of zero."""
        assert self.zero is not None
        if self._bad_loss or not total.requires_grad:
            total = torch.stack([(v * 0.0).sum() for v in self._values.values()]).sum()
        self.zero.backward(total, self.precision.bf16)
        self._values = {}

    # ---------------------------------------------------------------------------------------- step

    def apply(self) -> ApplyResult:
        self._require_trained("apply")
        factor = self.schedule.factor(self.updates)
        norm, skipped = 0.0, ""
        if self._micros:
            with self._guard("apply"):
                norm, skipped = self._step(factor)
        self.updates += 1
        self.skipped += bool(skipped)
        self._bad_loss, self._micros = "", 0
        return ApplyResult(norm, self.config.lr * factor, skipped)

    def _step(self, factor: float) -> tuple[float, str]:
        assert self.zero is not None
        assert self.base is not None
        norm, skipped = self._finish_gradients()
        if skipped:
            self.zero.discard()
            return norm, skipped
        seen = Coverage(self.partition, list(self.parameters), self.device) if self._without_coverage else None
        set_rates(self.base, self.config, factor)
        self.zero.step()
        if seen is not None:
            self._coverage = seen.after()
        if self.average is not None:
            self.average.update()
        return norm, ""

    def _finish_gradients(self) -> tuple[float, str]:
        """Reduce and clip the gradients. Returns (global norm before clipping, reason to skip the step), the same on
        every rank."""
        self._reduce()
        indices = range(len(self.partition.flats))
        local = sum(self.split.squares(self.partition, i) for i in indices)
        facts = torch.tensor([local, float(bool(self._bad_loss))], dtype=torch.float64, device=self.device)
        squares, bad = total(facts).tolist()
        norm = math.sqrt(squares / self.topology.replicas if self.partition.replicated else squares)
        if bad:
            return norm, first_text(self._bad_loss)
        if not math.isfinite(norm):
            return norm, f"non-finite gradient (norm {norm})"
        if self.config.max_grad_norm is not None and norm > self.config.max_grad_norm:
            parts = [g for i in indices for g in self.partition.gradients(i)]
            scale(parts, self.config.max_grad_norm / (norm + 1e-6))
        return norm, ""

    def _reduce(self) -> None:
        assert self.zero is not None
        if not self.zero.reduced:
            self.zero.reduce()
            self.split.agree(self.partition)

    def zero_grad(self) -> None:
        self._bad_loss, self._micros = "", 0
        if self.zero is not None and self.spec.role.trained:
            self.zero.discard()

    def gradients(self) -> dict[str, Tensor]:
        """Sums over ranks, whole on rank 0, one parameter at a time; zeros for parameters without a gradient."""
        shapes = {name: self.tensors.shapes[name] for name in self.parameters}
        found = {}
        with self._guard("gradients"):
            if self.zero is not None and self._micros:
                self._reduce()
            own = {
                p.name: (p, g) for i in range(len(self.partition.flats)) for p, g in self.partition.piece_gradients(i)
            }
            for name, shape in shapes.items():
                whole = torch.zeros(shape, device=self.device)
                replicated = self.partition.replicated and self.topology.replica
                if name in own and self.split.counts(name) and not replicated:
                    piece, gradient = own[name]
                    held = self.split.own(name, whole)
                    part = torch.zeros(held.numel(), device=self.device)
                    part[piece.start : piece.start + piece.numel] = gradient
                    held.copy_(part.view(held.shape))
                reduce_to_first(whole)
                if self.spec.rank == 0:
                    found[name] = whole.cpu()
        return found

    # --------------------------------------------------------------------------------------- state

    def save(self, path: Path) -> None:
        with self._guard("save"):
            checkpoint.save(self, Path(path))

    def load(self, path: Path) -> None:
        with self._guard("load"):
            checkpoint.load(self, Path(path))
