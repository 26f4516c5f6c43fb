"""Tokenised rows, the input of offline algorithms' ``assemble``."""

from __future__ import annotations

from collections.abc import Sequence as Ints
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rlhf.types import Row
from rlhf.types.arrays import IntArray, int_array
from rlhf.types.images import Image


@dataclass(frozen=True, slots=True)
class Sequence:
    """One tokenised sequence with the mask of the tokens to train on."""

    ids: IntArray
    """``array("i")``; the constructor takes any sequence of ints."""
    loss_mask: list[bool]
    role: int = 0
    """0 = demonstration or chosen, 1 = rejected, ..."""
    images: tuple[Image, ...] = ()
    """The images that tokens of ``ids`` stand for, in order."""

    if TYPE_CHECKING:  # the constructor takes more types than the field has

        def __init__(
            self, ids: Ints[int], loss_mask: list[bool], role: int = 0, images: tuple[Image, ...] = ()
        ) -> None: ...

    def __post_init__(self) -> None:
        object.__setattr__(self, "ids", int_array(self.ids, "Sequence.ids"))


@dataclass(frozen=True, slots=True)
class Example:
    """One data row, tokenised for the algorithm's data form."""

    row: Row
    sequences: list[Sequence]
    values: dict[str, Any] = field(default_factory=dict)
    """Further values of the data form. ``labels``: ``label``, bool. ``pairs``: ``margin``, float, if the data has that
    column. ``steps``: ``steps``, [(position in ``ids`` of the token that ends a step, label in 0..1), ...], for
    labelled steps."""
