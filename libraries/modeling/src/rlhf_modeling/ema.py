"""An exponential moving average of the weights, and how it is swapped with the live weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class Ema:
    """``ema := decay * ema + (1 - decay) * weights`` after every optimizer step (Polyak & Juditsky 1992, exponential
    form); it starts as the initial weights."""

    def __init__(
        self, parameters: dict[str, nn.Parameter], decay: float, rounded: Mapping[str, nn.Parameter] | None = None
    ) -> None:
        """``rounded``: the weights of the model whose masters ``parameters`` are."""
        self.decay, self.rounded = decay, rounded or {}
        self.parameters = parameters
        self.tensors: dict[str, Tensor] = {name: p.detach().clone() for name, p in parameters.items()}

    @torch.no_grad()
    def update(self) -> None:
        live = [p.detach() for p in self.parameters.values()]
        torch._foreach_lerp_(list(self.tensors.values()), live, 1.0 - self.decay)

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Inside, the parameters hold the average; no copy is made, except of weights that are rounded from masters."""
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

    def _swap(self) -> None:
        for name, p in self.parameters.items():
            p.data, self.tensors[name] = self.tensors[name], p.data
