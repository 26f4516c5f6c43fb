"""Converts a module's tensors to the names and shapes of its architecture's checkpoints, and back.

transformers may load a checkpoint into different tensors. For example, experts are separate in the file but one tensor
in the module, or modules have other names. It converts tensors when it loads and saves them. Trainers stream tensors
with the checkpoint's names and shapes, because generators load these.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rlhf_modeling.state import copy_into

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Published:
    """The conversion of one module.

    Args:
        shapes: {the module's name: shape} of its tensors without adapters, in the order in which they are streamed.
    """

    def __init__(self, module: PreTrainedModel, shapes: Mapping[str, torch.Size]) -> None:
        self._module, self._own_shapes = module, dict(shapes)
        self._single: dict[str, list[str]] = {}
        """{name in the module: published names} of tensors that are converted one at a time."""
        self._joint: list[str] = []
        """Names in the module of tensors that must be converted together."""
        published_shapes = self._published_shapes(self._own_shapes)
        if published_shapes != self._own_shapes:
            self._plan(published_shapes)
        names = [n for name in self._own_shapes if name not in self._joint for n in self._single.get(name, [name])]
        names += [n for n in published_shapes if n not in set(names)]
        self.shapes = {name: published_shapes[name] for name in names}
        """{published name: shape}, in the order of :meth:`stream`."""

    def layer(self, name: str) -> str | None:
        """The published name of a layer of the module; None if its weight is not one tensor of the same shape."""
        weight_name = f"{name}.weight"
        names = self._single.get(weight_name, [weight_name])
        shape = self._own_shapes.get(weight_name)
        if weight_name in self._joint or len(names) != 1 or self.shapes.get(names[0]) != shape:
            return None
        return names[0].removesuffix(".weight")

    def _plan(self, published_shapes: Mapping[str, torch.Size]) -> None:
        for name, shape in self._own_shapes.items():
            # A tensor that converts differently alone than among all others must be converted together with them.
            shapes = self._published_shapes({name: shape})
            if any(published_shapes.get(n) != s for n, s in shapes.items()):
                self._joint.append(name)
            elif shapes != {name: shape}:
                self._single[name] = list(shapes)

    def _published_shapes(self, shapes: Mapping[str, torch.Size]) -> dict[str, torch.Size]:
        meta = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
        return {name: tensor.shape for name, tensor in self._convert(meta).items()}

    def _convert(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        from transformers.core_model_loading import revert_weight_conversion

        converted: dict[str, Tensor] = revert_weight_conversion(self._module, tensors)
        return converted

    @torch.no_grad()
    def stream(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Convert (name in the module, tensor) to (published name, tensor). Tensors with the same name and shape pass
        unchanged. Others are views or copies, created one after the other."""
        group: dict[str, Tensor] = {}
        for name, tensor in tensors:
            if name in self._joint:
                group[name] = tensor
            elif name in self._single:
                yield from self._convert({name: tensor}).items()
            else:
                yield name, tensor
        if group:
            yield from self._convert(group).items()

    @torch.no_grad()
    def restore(self, weights: Mapping[str, Tensor], source: str) -> dict[str, Tensor]:
        """{name in the module: tensor} of whole published tensors.

        Raises CheckpointError, naming ``source``, if names or shapes differ from the published ones.
        """
        meta = {name: torch.empty(shape, device="meta") for name, shape in self.shapes.items()}
        # raises if they differ
        copy_into(meta, {name: tensor.to("meta") for name, tensor in weights.items()}, source)
        tensors = {n: weights[n] for n in self._own_shapes if n not in self._single and n not in self._joint}
        for group in [*([name] for name in self._single), *([self._joint] if self._joint else [])]:
            tensors |= self._gathered(group, weights)
        return {name: tensors[name] for name in self._own_shapes}

    def _gathered(self, group: list[str], weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Convert element numbers instead of values, which shows where each element belongs. Conversions move elements
        but do not change them."""
        numbers, count = {}, 0
        for name in group:
            size = math.prod(self._own_shapes[name])
            numbers[name] = torch.arange(count, count + size).view(self._own_shapes[name])
            count += size
        places = self._convert(numbers)
        like = weights[next(iter(places))]
        flat = torch.empty(count, dtype=like.dtype, device=like.device)
        for name, place in places.items():
            flat[place.reshape(-1).to(like.device)] = weights[name].reshape(-1)
        parts = flat.split([math.prod(self._own_shapes[name]) for name in group])
        return {name: part.view(self._own_shapes[name]) for name, part in zip(group, parts, strict=True)}
