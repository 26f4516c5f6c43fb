"""The part of a sharded trainer that gathers the model: whole weights, exports, views."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from itertools import chain
from pathlib import Path
from typing import ClassVar

import torch
from rlhf.errors import TrainingError
from rlhf.interfaces.model import ADAPTERS, PARTS
from safetensors.torch import save_file
from torch import Tensor

from rlhf_modeling.adapter_files import write_adapter
from rlhf_modeling.export_files import head_bias, token_classifier, write_configs
from rlhf_modeling.optimizer import give_back
from rlhf_modeling.pretrained import copy_processor, load_tokenizer, set_exported, set_exported_dtype
from rlhf_modeling.sharded.config import ShardedConfig
from rlhf_modeling.sharded.ema import ShardedCopy
from rlhf_modeling.sharded.partition import Partition, Piece, Split
from rlhf_modeling.sharded.process_group import barrier, collective, reduce_to_first
from rlhf_modeling.sharded.tensors import NamedTensors
from rlhf_modeling.trainer import PackedTrainer


class ShardedWeights(PackedTrainer):
    """One role's model over its ranks. The subclass loads it and divides it."""

    layout: ClassVar[frozenset[str]] = PackedTrainer.layout | {
        "timeout", "export_shard_bytes", "sequence_parallel"
    }  # fmt: skip
    config: ShardedConfig
    split: Split
    tensors: NamedTensors
    partition: Partition
    base: torch.optim.Optimizer | None = None
    """torch's optimizer; None for a frozen role."""
    average: ShardedCopy | None = None
    first: ShardedCopy | None = None

    def _guard(self, call: str) -> AbstractContextManager[None]:
        return collective(self.spec, call, self.config.timeout)

    def weights(self, view: str = "live", every_rank: bool = False) -> Iterator[tuple[str, Tensor]]:
        """Weights on rank 0, or on every rank with ``every_rank``. They are detached, on the trainer's device, tied
        weights once (under the embedding's name), adapters merged. Other ranks take part and yield nothing. Live
        tensors that are whole on a rank share memory with the model, so copy them if they must outlive the next
        step."""
        with self._guard("weights"), self._view(view):
            if view != ADAPTERS:
                tensors = self._stream(every_rank, merge=self.merges(view))
                # The end of another view puts the live values into the same memory, and readers hold the last tensors
                # beyond it: a bucket, or an export that adds a tensor of its own.
                yield from tensors if view in ("live", PARTS) else ((name, t.clone()) for name, t in tensors)
            for name in self.parameters if view in (ADAPTERS, PARTS) else ():
                tensor = self._full_tensor(name)
                if self.spec.rank == 0 or every_rank:
                    yield self.tensors.sent_name(name), tensor

    @abstractmethod
    def _stream(self, every_rank: bool, merge: bool) -> Iterator[tuple[str, Tensor]]:
        """The whole tensors, on rank 0 or on every rank."""

    def load_weights(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        """Every rank gets whole tensors and keeps its part."""
        self.require_replaceable()
        source = f"the weight stream for role {self.spec.role.name!r}"
        with self._guard("load_weights"):
            self.tensors.overwrite(dict(weights), self.partition, source)
            self.partition.publish()

    def export(self, path: Path, view: str = "live") -> None:
        path = Path(path)
        if self.spec.rank == 0:
            path.mkdir(parents=True, exist_ok=True)
            write_configs(path, self.module, self.tokenizer or load_tokenizer(self.spec))
            copy_processor(self.spec, path)
            weights, sizes = self._exported(view), self.tensors.published(self._exports_masters)
            if classifier := token_classifier(self.loaded_model):
                bf16 = self.spec.storage == "bf16" and not self._exports_masters
                added = head_bias(self.loaded_model, torch.bfloat16 if bf16 else torch.float32)
                weights = chain(weights, added.items())
                sizes = sizes | {name: bias.nbytes for name, bias in added.items()}
                set_exported(path, architectures=[classifier])
            write_weights(path, weights, sizes, self.config.export_shard_bytes)
            if self.spec.storage == "bf16":  # for divided masters transformers would write fp32
                set_exported_dtype(path, torch.float32 if self._exports_masters else torch.bfloat16)
        else:
            for _ in self._exported(view):
                pass
        if (lora := self.exported_adapters(view)) is not None:
            tensors = self._trained_tensors(view)
            if self.spec.rank == 0:
                write_adapter(path, self.spec, self.loaded_model, lora, tensors, token_classifier(self.loaded_model))
        with self._guard("export"):
            barrier()

    def _trained_tensors(self, view: str) -> dict[str, Tensor]:
        """The whole trained tensors, on rank 0."""
        tensors = {}
        with self._guard("export"), self._view(view):
            for name in self.parameters:
                tensor = self._full_tensor(name)
                if self.spec.rank == 0:
                    tensors[name] = tensor.cpu().clone()
        return tensors

    def _full_tensor(self, name: str) -> Tensor:
        """A whole trained tensor. Every rank must call this method."""
        return self.tensors.full_tensor(name)

    @property
    def _exports_masters(self) -> bool:
        return self.config.export_masters and self.spec.role.trained

    def _exported(self, view: str) -> Iterator[tuple[str, Tensor]]:
        """Same as :meth:`weights`, but with the masters of bf16 weights, under the same names."""
        if not self._exports_masters:
            yield from self.weights(view)
            return
        with self._guard("export"), self._view(view):
            yield from self.tensors.renamed(self._masters())

    def _masters(self) -> Iterator[tuple[str, Tensor]]:
        pieces = {
            piece.name: (piece, flat.data[piece.offset : piece.offset + piece.numel])
            for flat in self.partition.flats
            for piece in flat.pieces
        }
        for name, tensor in self.tensors.objects.items():
            master = self._collected(name, pieces.get(name)) if name in self.parameters else tensor.detach()
            if self.spec.rank == 0:
                yield name, master

    def _collected(self, name: str, elements: tuple[Piece, Tensor] | None) -> Tensor:
        """The whole fp32 tensor of a parameter on rank 0, from the elements that the ranks own. Every rank calls it.

        Args:
            elements: [numel] this rank's elements, if it has any, such as its part of a gradient.
        """
        tensor = torch.zeros(self.tensors.shapes[name], device=self.device)
        replicated = self.partition.replicated and self.split.topology.replica
        if elements is not None and self.split.counts(name) and not replicated:
            self.split.write(tensor, *elements)
        reduce_to_first(tensor)
        return tensor

    def use_view(self, view: str) -> None:
        with self._guard("use_view"):
            super().use_view(view)

    def offload(self) -> None:
        """Optimizer state, its copy of the weights, the average and gradient buffers move to host memory. On a CPU they
        are there already."""
        if self.spec.role.trained:
            self._offload_optimizer()
        if self.average is not None:
            self.average.move("cpu")
        if self.first is not None:
            self.first.move("cpu")
        give_back(self.device)

    def reload(self) -> None:
        if self.spec.role.trained:
            self._reload_optimizer()
        if self.average is not None and self._average_on_device:
            self.average.move(self.device)
        if self.first is not None and self._average_on_device:
            self.first.move(self.device)

    @abstractmethod
    def _offload_optimizer(self) -> None:
        """Move tensors that only the step needs to host memory."""

    @abstractmethod
    def _reload_optimizer(self) -> None:
        """Undo :meth:`_offload_optimizer`."""

    @property
    def _average_on_device(self) -> bool:
        return True


WEIGHTS_FILE = "model.safetensors"


def plan_files(sizes: Mapping[str, int], limit: int) -> list[list[str]]:
    """Tensor names per file, in order; a file holds at most ``limit`` bytes, or one larger tensor."""
    files: list[list[str]] = [[]]
    file_bytes = 0
    for name, size in sizes.items():
        if files[-1] and file_bytes + size > limit:
            files.append([])
            file_bytes = 0
        files[-1].append(name)
        file_bytes += size
    return files


def write_weights(path: Path, weights: Iterator[tuple[str, Tensor]], sizes: Mapping[str, int], limit: int) -> None:
    """``weights``, in the order of ``sizes`` ({name: bytes}), as safetensors files; several with an index."""
    plan = plan_files(sizes, limit)
    count = len(plan)
    names = [WEIGHTS_FILE] if count == 1 else [f"model-{n + 1:05d}-of-{count:05d}.safetensors" for n in range(count)]
    weight_map: dict[str, str] = {}
    for file, file_names in zip(names, plan, strict=True):
        tensors: dict[str, Tensor] = {}
        for expected in file_names:
            name, tensor = next(weights)
            if name != expected:
                raise TrainingError(f"the export expected the weight {expected!r}, got {name!r}")
            tensors[name] = tensor.detach().contiguous().cpu()
        save_file(tensors, path / file, metadata={"format": "pt"})
        (path / file).chmod(0o644)
        weight_map |= dict.fromkeys(tensors, file)
    for name, _ in weights:  # read to the end, so that all ranks leave the view together
        raise TrainingError(f"the export expected no further weight, got {name!r}")
    if count > 1:
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}
        (path / f"{WEIGHTS_FILE}.index.json").write_text(
            json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8"
        )
