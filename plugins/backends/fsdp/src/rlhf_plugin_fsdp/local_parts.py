"""A rank's part of every parameter, for the optimizer, checkpoints and the weight stream.

FSDP2 divides a parameter along its first dimension: each rank holds some consecutive rows. These are also consecutive
elements of the flattened parameter. The optimizer updates plain tensors that share memory with the rows.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

import torch
from rlhf_modeling.sharded.partition import Flat, Partition, Piece, Split
from rlhf_modeling.sharded.tensors import NamedTensors
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class LocalParts(Partition):
    """The rows that this rank holds. The last ranks have fewer rows, or none.

    Args:
        parameters: {name: divided parameter}, with gradients if trained.
        root: the divided module, which gathers them.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], root: Any, rank: int, ranks: int) -> None:
        self.root = root
        self.sources = [_divided(p) for p in parameters.values()]
        self.flats = []
        self.owners: dict[str, nn.Parameter] = {}
        """{name: the tensor that the optimizer steps}."""
        for name, source in zip(parameters, self.sources, strict=True):
            # As torch.chunk divides, which FSDP2 uses.
            rows = -(-source.shape[0] // ranks)
            start = min(rank * rows, source.shape[0]) * (source.numel() // max(1, source.shape[0]))
            owner = nn.Parameter(_rows(source), requires_grad=source.requires_grad)
            numel = owner.numel()
            self.owners[name] = owner
            self.flats.append(Flat(owner, [Piece(name, start, 0, numel)] if numel else [], [name]))

    def gradients(self, index: int) -> list[Tensor]:
        gradient = self.sources[index].grad
        if gradient is None or not self.flats[index].pieces:
            return []
        return [_rows(_divided(gradient))]

    def give_gradients(self) -> None:
        """Set the gradients of the tensors that the optimizer updates. If no rank used a parameter, its gradient is
        zero, as in other trainers. FSDP gives zeros only to some of these parameters, depending on their module and on
        earlier steps."""
        for index, flat in enumerate(self.flats):
            if flat.pieces:
                flat.owner.grad = next(iter(self.gradients(index)), None)
                if flat.owner.grad is None:
                    flat.owner.grad = torch.zeros_like(flat.owner)

    def discard(self) -> None:
        """Discard all gradients."""
        for flat, source in zip(self.flats, self.sources, strict=True):
            flat.owner.grad = source.grad = None

    def publish(self) -> None:
        """Make the next forward pass gather the values again."""
        for part in self.root.modules():
            if isinstance(part, FSDPModule):
                part.reshard()


class DividedTensors(NamedTensors):
    """``rounded``: names of the parameters that are masters of weights in bf16."""

    def __init__(self, module: PreTrainedModel, split: Split, rounded: Collection[str] = ()) -> None:
        self.rounded = frozenset(rounded)
        super().__init__(module, split)

    def shape(self, name: str, tensor: Tensor) -> torch.Size:
        return torch.Size(tensor.shape)

    def dtype(self, name: str) -> torch.dtype:
        return torch.bfloat16 if name in self.rounded else super().dtype(name)

    @torch.no_grad()
    def full_tensor(self, name: str) -> Tensor:
        return gathered(self.objects[name], self.dtype(name))


@torch.no_grad()
def gathered(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The whole tensor. Each rank rounds its part to ``dtype`` before it sends it. Every rank must call this
    function."""
    values = tensor.detach().to(dtype)
    return values.full_tensor() if isinstance(values, DTensor) else values


def return_pages(device: torch.device) -> None:
    """Return freed memory to the system, if tensors are in memory of the C library.

    Layers are gathered and freed in turn, between activations that remain. glibc rarely puts an aligned tensor into the
    gap of an equal earlier one. Its heap becomes twice as large as the bytes in use, and grows with every step.
    """
    if device.type == "cpu" and sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it, musl does not
        if trim is not None:
            trim(0)


def _divided(tensor: Tensor) -> DTensor:
    assert isinstance(tensor, DTensor)
    return tensor


@torch.no_grad()
def _rows(tensor: DTensor) -> Tensor:
    """This rank's rows, a view."""
    return tensor.to_local()
