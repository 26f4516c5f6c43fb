"""A role's tensors by Hugging Face name, whole where somebody needs them whole, bucket by bucket."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from rlhf.modeling import state
from torch import Tensor, nn
from transformers import PreTrainedModel

from rlhf_plugin_deepspeed.shards import Shards

Gather = Callable[[list[nn.Parameter]], AbstractContextManager[Any]]


class Tensors:
    """Parameters and persistent buffers, tied ones once, in a fixed order. Weights may be divided already."""

    def __init__(self, module: PreTrainedModel) -> None:
        self.objects: dict[str, Tensor] = {}
        seen: set[int] = set()
        for name, tensor in module.state_dict(keep_vars=True).items():
            if id(tensor) not in seen:
                seen.add(id(tensor))
                self.objects[name] = tensor
        self.shapes = {name: torch.Size(getattr(t, "ds_shape", t.shape)) for name, t in self.objects.items()}
        self.bytes = {name: self.shapes[name].numel() * t.element_size() for name, t in self.objects.items()}
        self.parameters = {name: p for name, p in self.objects.items() if isinstance(p, nn.Parameter)}

    def stream(self, gather: Gather | None, first: bool, elements: int) -> Iterator[tuple[str, Tensor]]:
        """(name, whole tensor) on the rank that is ``first``; the others only take part.

        Where weights are divided (``gather``), about ``elements`` of them are whole at once, and copies are yielded;
        otherwise they share memory with the model.
        """
        if gather is None:
            if first:
                yield from ((name, tensor.detach()) for name, tensor in self.objects.items())
            return
        for names in self._buckets(elements):
            with gather([self.parameters[n] for n in names if n in self.parameters]):
                copies = [(n, self.objects[n].detach().clone()) for n in names] if first else []
            yield from copies

    def _buckets(self, elements: int) -> Iterator[list[str]]:
        names: list[str] = []
        held = 0
        for name, shape in self.shapes.items():
            if names and held + shape.numel() > elements:
                yield names
                names, held = [], 0
            names.append(name)
            held += shape.numel()
        yield names

    @torch.no_grad()
    def overwrite(self, given: Mapping[str, Tensor], shards: Shards, where: str) -> None:
        """Copy whole tensors into the model, in ``shards`` the pieces that this rank owns.

        Raises CheckpointError, with nothing changed, where names or shapes differ.
        """
        expected = {name: torch.empty(shape, device="meta") for name, shape in self.shapes.items()}
        state.copy_into(expected, {n: t.to("meta") for n, t in given.items()}, where)  # for its messages
        for flat in shards.flats:
            for piece in flat.pieces:
                values = given[piece.name].reshape(-1)[piece.start : piece.start + piece.numel]
                flat.data[piece.offset : piece.offset + piece.numel].copy_(values)
        for name, target in self.objects.items():
            if name not in self.parameters:
                target.copy_(given[name])
