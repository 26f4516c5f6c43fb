"""A role's tensors by Hugging Face name, gathered one after the other."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from rlhf_modeling.adapter_files import sent_name
from rlhf_modeling.adapters import NAME, adapted, is_adapter, merged_name, with_product
from rlhf_modeling.checkpoint_tensors import Published
from rlhf_modeling.sharded.partition import Partition, Split

if TYPE_CHECKING:
    from transformers import PreTrainedModel

BASE = ".base_layer.weight"


class NamedTensors(ABC):
    """Parameters and persistent buffers in a fixed order. Tied tensors occur once."""

    def __init__(self, module: PreTrainedModel, split: Split) -> None:
        self.module, self.split = module, split
        self.objects: dict[str, Tensor] = {}
        ids: set[int] = set()
        for name, tensor in module.state_dict(keep_vars=True).items():
            if id(tensor) not in ids:
                ids.add(id(tensor))
                self.objects[name] = tensor
        self.shapes = {name: self.shape(name, tensor) for name, tensor in self.objects.items()}
        """{name: shape of the whole tensor}."""
        self.parameters = {name: p for name, p in self.objects.items() if isinstance(p, nn.Parameter)}
        self._adapted = dict(adapted(module))
        self._published = Published(module, {merged_name(n): self.shapes[n] for n in self._model()})

    @abstractmethod
    def shape(self, name: str, tensor: Tensor) -> torch.Size:
        """Shape of the whole tensor."""

    def dtype(self, name: str) -> torch.dtype:
        """Number format in which the tensor is sent and exported."""
        return self.objects[name].dtype

    @abstractmethod
    def full_tensor(self, name: str) -> Tensor:
        """The whole tensor, detached. All ranks that hold parts of it must call this method."""

    def renamed(self, tensors: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Rename whole tensors, in the module's order, from the module's names to those of :meth:`published`."""
        return self._published.stream(tensors)

    def sent_name(self, name: str) -> str:
        """The name under which an engine gets a tensor of an adapter."""
        return sent_name(self._published, name)

    def published(self, fp32: bool = False) -> dict[str, int]:
        """{name: bytes} of the whole model without adapters, under the names of the architecture's checkpoints.
        ``fp32``: bytes of the masters."""
        size = 4 if fp32 else self.dtype(next(iter(self.parameters))).itemsize  # a buffer's size may differ
        return {name: shape.numel() * size for name, shape in self._published.shapes.items()}

    def stream(self, first: bool, merge: bool) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, whole tensor) on ranks with ``first``, under the names of :meth:`published`, detached. Other
        ranks take part and yield nothing. One tensor is whole at a time.

        Args:
            merge: add the adapters to copies of their weights.
        """
        return self._published.stream(self._named_tensors(first, merge))

    def _named_tensors(self, first: bool, merge: bool) -> Iterator[tuple[str, Tensor]]:
        for name in self._model():
            tensor = self._put_together(name, merge)
            if first:
                yield merged_name(name), tensor
            # Otherwise two whole tensors would exist while the next one is gathered.
            del tensor

    @torch.no_grad()
    def _put_together(self, name: str, merge: bool) -> Tensor:
        """A whole tensor, with its adapter if ``merge``."""
        owner = name.removesuffix(BASE)
        if owner == name or not merge:
            return self.full_tensor(name)
        a_RI, b_OR = (self.full_tensor(f"{owner}.{factor}.{NAME}.weight") for factor in ("lora_A", "lora_B"))
        length = f"{owner}.lora_magnitude_vector.{NAME}.weight"
        length_O = self.full_tensor(length) if length in self.objects else None
        return with_product(self.full_tensor(name), self._adapted[owner], a_RI, b_OR, length_O)

    def _model(self) -> list[str]:
        return [name for name in self.objects if not is_adapter(name)]

    @torch.no_grad()
    def overwrite(self, weights: Mapping[str, Tensor], partition: Partition, source: str) -> None:
        """Copy whole tensors into the model, and the pieces that this rank owns into ``partition``.

        Raises CheckpointError, with nothing changed, if names or shapes differ.
        """
        weights = self._published.restore(weights, source)
        for flat in partition.flats:
            for piece in flat.pieces:
                values = self.split.local_part(piece.name, weights[piece.name]).reshape(-1)[
                    piece.start : piece.start + piece.numel
                ]
                flat.data[piece.offset : piece.offset + piece.numel].copy_(values)
        for name, target in self.objects.items():
            if name not in self.parameters:
                target.copy_(weights[name])
