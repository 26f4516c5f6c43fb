"""The part of the trainer that gathers a sharded model: whole weights, its output head, exports, offload."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from rlhf.errors import TrainingError
from rlhf.ops.heads import OutputHead
from rlhf_modeling.adapters import without_adapters
from rlhf_modeling.optimizer import give_back
from rlhf_modeling.pretrained import load_tokenizer
from rlhf_modeling.trainer import PackedTrainer
from torch import Tensor

from rlhf_plugin_deepspeed import export
from rlhf_plugin_deepspeed.config import DeepSpeedTrainerConfig
from rlhf_plugin_deepspeed.engine import ZeroEngine
from rlhf_plugin_deepspeed.named_tensors import NamedTensors
from rlhf_plugin_deepspeed.process_group import barrier, collective
from rlhf_plugin_deepspeed.sharded_ema import ShardedEma
from rlhf_plugin_deepspeed.tensor_split import TensorSplit
from rlhf_plugin_deepspeed.topology import Topology
from rlhf_plugin_deepspeed.zero_partition import ZeroPartition


class ShardedTrainer(PackedTrainer):
    """One role's model over its ranks. The subclass loads and trains it."""

    layout: ClassVar[frozenset[str]] = PackedTrainer.layout | {
        "stage", "tensor_parallel", "offload_optimizer", "offload_params", "hpz_partition_size", "keep_whole",
        "gathered", "bucket", "timeout", "export_shard_bytes",
    }  # fmt: skip
    config: DeepSpeedTrainerConfig
    topology: Topology
    split: TensorSplit
    tensors: NamedTensors
    partition: ZeroPartition
    base: torch.optim.Optimizer | None = None
    """torch's optimizer; None for a frozen role."""
    zero: ZeroEngine | None = None
    """None if the role is neither trained nor divided by stage 3."""
    average: ShardedEma | None = None

    @property
    def views(self) -> tuple[str, ...]:
        return ("live", *(("ema",) if self.average is not None else ()), *(("base",) if self.has_adapters else ()))

    def _guard(self, call: str) -> AbstractContextManager[None]:
        return collective(self.spec, call, self.config.timeout)

    # ------------------------------------------------------------------------------------- weights

    def weights(self, view: str = "live", every_rank: bool = False) -> Iterator[tuple[str, Tensor]]:
        """On rank 0, or on every rank with ``every_rank``: detached, on the trainer's device, tied weights once (under
        the embedding's name), adapters merged. Other ranks take part and yield nothing. In stages 0 to 2 tensors that
        are not divided share memory with the model: copy what must outlive the next step."""
        gather = self.zero.gathered if self.zero is not None and self.config.stage == 3 else None
        with self._guard("weights"), self._view(view):
            first = self.spec.rank == 0 or every_rank
            near = self.topology.replica == 0 or every_rank
            yield from self.tensors.stream(gather, first, near, self.config.bucket, view != "base")

    def lend_head(self) -> Iterator[OutputHead]:
        """In stages 0 to 2 the head shares memory with the model; in stage 3 it is a gathered copy."""
        head = None
        with self._guard("lend_head"), self._head_gathered():
            if self.spec.rank == 0:
                head = self.loaded.output_head
                if self.config.stage == 3:
                    bias_V = None if head.bias_V is None else head.bias_V.clone()
                    head = replace(head, weight_VH=head.weight_VH.clone(), bias_V=bias_V)
        if head is not None:
            yield head

    def _head_gathered(self) -> AbstractContextManager[Any]:
        if self.zero is None or self.config.stage < 3:
            return nullcontext()
        return self.zero.gathered(list(self.loaded.head.parameters()))

    def load_weights(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        """Every rank gets whole tensors and keeps its part."""
        if self.has_adapters:
            raise TrainingError(f"role {self.spec.role.name!r} trains adapters; its weights cannot be replaced")
        where = f"the weight stream for role {self.spec.role.name!r}"
        with self._guard("load_weights"):
            self.tensors.overwrite(dict(weights), self.partition, where)
            self.partition.publish()

    def export(self, path: Path, view: str = "live") -> None:
        path = Path(path)
        if self.spec.rank == 0:
            path.mkdir(parents=True, exist_ok=True)
            export.write_configs(path, self.module, self.tokenizer or load_tokenizer(self.spec))
            limit = self.config.export_shard_bytes
            export.write_weights(path, self.weights(view), self.tensors.published(), limit)
        else:
            for _ in self.weights(view):
                pass
        with self._guard("export"):
            barrier()

    def use_view(self, view: str) -> None:
        with self._guard("use_view"):
            super().use_view(view)

    def offload(self) -> None:
        """Optimizer state, its copy of the weights, the average and gradient buffers move to host memory. On a CPU they
        are there already."""
        if self.zero is not None and self.spec.role.trained:
            self.zero.offload()
        if self.average is not None:
            self.average.move("cpu")
        give_back(self.device)

    def reload(self) -> None:
        if self.zero is not None and self.spec.role.trained:
            self.zero.reload()
        if self.average is not None and self.config.offload_optimizer == "none":
            self.average.move(self.device)

    # ------------------------------------------------------------------------------------ internals

    def _view(self, view: str) -> AbstractContextManager[None]:
        if view == "live":
            return nullcontext()
        if view == "ema" and self.average is not None:
            return self.average.swapped_in()
        if view == "base" and self.has_adapters:
            return without_adapters(self.module)
        raise self._no_view(view, {"ema": "ema_decay is not set", "base": "lora is not set, so it has no adapters"})
