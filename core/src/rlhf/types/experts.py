"""The experts that a mixture of experts chose for tokens."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ExpertLayers:
    """The layers with experts of a model."""

    layers: tuple[int, ...]
    """Their numbers among all layers of the model, from 0."""
    experts: int
    """Number of experts in each such layer."""
    chosen: int
    """Experts that one token uses in each such layer."""


@dataclass(frozen=True, slots=True)
class ExpertRecord:
    """The experts that a model chose for neighbouring tokens (:attr:`rlhf.types.Turn.experts`)."""

    choices: bytes
    """[tokens, layers, chosen], one byte each, or two (little-endian) where a layer has more than 256 experts."""
    layers: int
    """Number of layers with experts."""
    experts: int
    """Number of experts in each such layer."""
    chosen: int
    """Experts that one token uses in each such layer."""

    @property
    def dtype(self) -> str:
        """Of numpy."""
        return "u1" if self.experts <= 256 else "<u2"

    @property
    def token_bytes(self) -> int:
        return self.layers * self.chosen * (1 if self.experts <= 256 else 2)

    @property
    def tokens(self) -> int:
        return len(self.choices) // self.token_bytes if self.token_bytes else 0
