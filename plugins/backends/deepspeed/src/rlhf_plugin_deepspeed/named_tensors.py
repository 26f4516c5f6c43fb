"""A role's tensors by Hugging Face name, gathered bucket by bucket if ZeRO divides them by their elements."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from rlhf_modeling.adapters import base_tensors, is_adapter, merged
from rlhf_modeling.sharded.tensors import BASE, NamedTensors
from torch import Tensor, nn

from rlhf_plugin_deepspeed.tensor_split import TensorSplit

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Gather = Callable[[list[nn.Parameter]], AbstractContextManager[Any]]


class ZeroTensors(NamedTensors):
    """Weights may be divided by their elements (stage 3) or into parts (``split``)."""

    split: TensorSplit

    def __init__(self, module: PreTrainedModel, split: TensorSplit) -> None:
        super().__init__(module, split)
        self._adapters = {
            owner: [name for name in self.objects if name.startswith(f"{owner}.") and is_adapter(name)]
            for owner in self._adapted
        }

    def shape(self, name: str, tensor: Tensor) -> torch.Size:
        return self.split.shape(name, torch.Size(getattr(tensor, "ds_shape", tensor.shape)))

    def full_tensor(self, name: str) -> Tensor:
        """From the parts of a replica's ranks. All of them must call this method."""
        return self.split.full_tensor(name, self.objects[name].detach())

    def stream_gathered(
        self, gather: Gather | None, first: bool, has_parts: bool, elements: int, merge: bool
    ) -> Iterator[tuple[str, Tensor]]:
        """:meth:`stream` of divided weights.

        With ``gather`` (weights divided by their elements), about ``elements`` elements are gathered at once, and the
        yielded tensors are copies. Otherwise they share memory with the model, except tensors that are assembled from
        parts, and those that checkpoints store in another layout.

        Args:
            has_parts: whether this rank holds parts of the same tensors as a rank with ``first``.
        """
        if self.split.dims:
            return self.stream(first, merge) if has_parts else iter(())
        return self._published.stream(self._gathered(gather, first, elements, merge))

    def _gathered(self, gather: Gather | None, first: bool, elements: int, merge: bool) -> Iterator[tuple[str, Tensor]]:
        """The whole tensors under the module's names."""
        if gather is None:
            if first:
                yield from self._merged_or_base(self._model(), merge)
            return
        for names in self._buckets(elements):
            needed = [*names, *(a for n in names for a in self._adapters.get(n.removesuffix(BASE), ()))]
            with gather([self.parameters[n] for n in needed if n in self.parameters]):
                copies = [(n, t.clone()) for n, t in self._merged_or_base(names, merge)] if first else []
            yield from copies

    def _merged_or_base(self, names: list[str], merge: bool) -> Iterator[tuple[str, Tensor]]:
        tensors = {name: self.objects[name] for name in names}
        return (merged if merge and self._adapters else base_tensors)(self.module, tensors)

    def _buckets(self, elements: int) -> Iterator[list[str]]:
        names: list[str] = []
        total = 0
        for name in self._model():
            size = self.shapes[name].numel()
            if names and total + size > elements:
                yield names
                names, total = [], 0
            names.append(name)
            total += size
        yield names
