"""A role's tensors by Hugging Face name, gathered whole, bucket by bucket."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from rlhf_modeling.adapters import NAME, adapted, base_tensors, is_adapter, merged, merged_name, with_product
from rlhf_modeling.published import Published
from torch import Tensor, nn
from transformers import PreTrainedModel

from rlhf_plugin_deepspeed.tensor_split import TensorSplit
from rlhf_plugin_deepspeed.zero_partition import ZeroPartition

BASE = ".base_layer.weight"
Gather = Callable[[list[nn.Parameter]], AbstractContextManager[Any]]


class NamedTensors:
    """Parameters and persistent buffers, tied ones once, in a fixed order. Weights may be divided by their
    elements (stage 3) or into parts (``split``).

    :meth:`stream` yields them under the names of the architecture's checkpoints, without adapters.
    """

    def __init__(self, module: PreTrainedModel, split: TensorSplit) -> None:
        self.module, self.split = module, split
        self.objects: dict[str, Tensor] = {}
        seen: set[int] = set()
        for name, tensor in module.state_dict(keep_vars=True).items():
            if id(tensor) not in seen:
                seen.add(id(tensor))
                self.objects[name] = tensor
        self.shapes = {
            name: split.shape(name, torch.Size(getattr(t, "ds_shape", t.shape))) for name, t in self.objects.items()
        }
        """{name: shape of the whole tensor}."""
        self.parameters = {name: p for name, p in self.objects.items() if isinstance(p, nn.Parameter)}
        self._adapted = dict(adapted(module))
        self._adapters = {
            owner: [name for name in self.objects if name.startswith(f"{owner}.") and is_adapter(name)]
            for owner in self._adapted
        }
        self._published = Published(module, {merged_name(n): self.shapes[n] for n in self._model()})

    def published(self) -> dict[str, int]:
        """{name: bytes} of what :meth:`stream` yields."""
        size = next(iter(self.parameters.values())).element_size()  # fp32; that of a buffer may differ
        return {name: shape.numel() * size for name, shape in self._published.shapes.items()}

    def stream(
        self, gather: Gather | None, first: bool, near: bool, elements: int, merge: bool
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, whole tensor) on ranks with ``first``. Other ranks take part and yield nothing.

        With ``gather`` (weights divided by their elements) about ``elements`` elements are whole at once, and the
        yielded tensors are copies. Otherwise they share memory with the model, except tensors that are assembled from
        parts, and those that checkpoints store in another layout.

        Args:
            near: whether this rank holds parts of the same tensors as a rank with ``first``.
            merge: add the adapters to copies of their weights.
        """
        return self._published.stream(self._whole(gather, first, near, elements, merge))

    def _whole(
        self, gather: Gather | None, first: bool, near: bool, elements: int, merge: bool
    ) -> Iterator[tuple[str, Tensor]]:
        """Like :meth:`stream`, under the module's names."""
        if self.split.dims:
            for name in self._model() if near else ():
                whole = self._put_together(name, merge)
                if first:
                    yield merged_name(name), whole
            return
        if gather is None:
            if first:
                yield from self._seen(self._model(), merge)
            return
        for names in self._buckets(elements):
            needed = [*names, *(a for n in names for a in self._adapters.get(n.removesuffix(BASE), ()))]
            with gather([self.parameters[n] for n in needed if n in self.parameters]):
                copies = [(n, t.clone()) for n, t in self._seen(names, merge)] if first else []
            yield from copies

    @torch.no_grad()
    def _put_together(self, name: str, merge: bool) -> Tensor:
        """A whole tensor, assembled from the parts of a replica's ranks. All of them must call this method."""

        def whole(of: str) -> Tensor:
            return self.split.whole(of, self.objects[of].detach())

        owner = name.removesuffix(BASE)
        if owner == name or not merge:
            return whole(name)
        a_RI, b_OR = (whole(f"{owner}.{factor}.{NAME}.weight") for factor in ("lora_A", "lora_B"))
        return with_product(whole(name), self._adapted[owner], a_RI, b_OR)

    def _model(self) -> list[str]:
        return [name for name in self.objects if not is_adapter(name)]

    def _seen(self, names: list[str], merge: bool) -> Iterator[tuple[str, Tensor]]:
        tensors = {name: self.objects[name] for name in names}
        return merged(self.module, tensors) if merge and self._adapters else base_tensors(tensors)

    def _buckets(self, elements: int) -> Iterator[list[str]]:
        names: list[str] = []
        held = 0
        for name in self._model():
            size = self.shapes[name].numel()
            if names and held + size > elements:
                yield names
                names, held = [], 0
            names.append(name)
            held += size
        yield names

    @torch.no_grad()
    def overwrite(self, given: Mapping[str, Tensor], partition: ZeroPartition, where: str) -> None:
        """Copy whole tensors into the model, and the pieces that this rank owns into ``partition``.

        Raises CheckpointError, with nothing changed, if names or shapes differ.
        """
        given = self._published.restore(given, where)
        for flat in partition.flats:
            for piece in flat.pieces:
                values = self.split.own(piece.name, given[piece.name]).reshape(-1)[
                    piece.start : piece.start + piece.numel
                ]
                flat.data[piece.offset : piece.offset + piece.numel].copy_(values)
        for name, target in self.objects.items():
            if name not in self.parameters:
                target.copy_(given[name])
