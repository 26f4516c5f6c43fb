"""Second values of the trained weights: their moving average, or their initial values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch
from torch import Tensor, nn


class SecondValues(Protocol):
    """Second values of a trainer's weights."""

    def swapped_in(self) -> AbstractContextManager[None]:
        """Context in which the parameters hold the second values."""


class Copy:
    """A copy of the weights from the time when this object was created, and after :meth:`update` their average."""

    def __init__(self, parameters: dict[str, nn.Parameter], rounded: Mapping[str, nn.Parameter] | None = None) -> None:
        """``rounded``: the weights of the model, if ``parameters`` are their masters."""
        self.rounded = rounded or {}
        self.parameters = parameters
        self.tensors: dict[str, Tensor] = {name: p.detach().clone() for name, p in parameters.items()}

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Context in which the parameters hold the second values. Only weights that are rounded from masters are
        copied."""
        # After the swap the masters hold the second values, from which the weights are rounded.
        self._swap()
        live = {name: p.data for name, p in self.rounded.items()}
        for name, p in self.rounded.items():
            p.data = self.parameters[name].data.to(p.dtype)
        try:
            yield
        finally:
            for name, p in self.rounded.items():
                p.data = live[name]
            self._swap()

    @torch.no_grad()
    def update(self, decay: float) -> None:
        """``values := decay * values + (1 - decay) * weights`` (Polyak & Juditsky 1992, exponential form)."""
        live = [p.detach() for p in self.parameters.values()]
        torch._foreach_lerp_(list(self.tensors.values()), live, 1.0 - decay)

    def _swap(self) -> None:
        for name, p in self.parameters.items():
            p.data, self.tensors[name] = self.tensors[name], p.data
