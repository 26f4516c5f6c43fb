"""Canaries: sequences for which the generator and the trainer must compute the same log-probs after a sync."""

from __future__ import annotations

import io
import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from rlhf.ops.packing import SequenceData, UnitData
from rlhf.types import Image
from torch import Tensor

from rlhf_runtime.data.image_tokens import ImageTokens

CANARY_TOKENS = 24
SIDE = 64
"""Height and width of a canary's image, in pixels. Processors of large patches make several features of it."""


@dataclass(frozen=True, slots=True)
class Canary:
    ids: Sequence[int]
    images: tuple[Image, ...] = ()
    first: int = 1
    """Position of the first token whose log-prob is compared: after the image, if there is one. Tokens before an image
    do not depend on it and would only lower the mean. Those of the image are never trained on."""

    def unit(self) -> UnitData:
        """The canary as a unit of a batch for the trainer."""
        mask = [i >= self.first for i in range(len(self.ids))]
        return UnitData([SequenceData(self.ids, {"loss_mask": mask}, images=self.images)])


def text_canary(draw: random.Random, vocabulary: int, tokens: int) -> Canary:
    """Random tokens."""
    return Canary([draw.randrange(vocabulary) for _ in range(tokens)])


def image_canary(draw: random.Random, vocabulary: int, place: ImageTokens, longest: int) -> Canary | None:
    """One random token, an image of noise with the tokens that the run's data would have for it, and random tokens.

    None where ``longest`` tokens leave no room after the image.
    """
    import PIL.Image

    file = io.BytesIO()
    PIL.Image.frombytes("RGB", (SIDE, SIDE), draw.randbytes(SIDE * SIDE * 3)).save(file, "PNG")
    image_ids, _, [image] = place.place([place.placeholder], [file.getvalue()])
    first = 1 + len(image_ids)
    if longest <= first:
        return None
    front, *after = (draw.randrange(vocabulary) for _ in range(1 + min(CANARY_TOKENS, longest - first)))
    return Canary([front, *image_ids, *after], (image.moved(1),), first)


def mean_differences(
    canaries: Sequence[Canary], ours_N: Tensor, engines: Sequence[Sequence[Sequence[float]]]
) -> list[float]:
    """Of each canary, the mean |difference| of the engine that differs most; NaN where either side is not finite.

    Args:
        ours_N: the trainer's log-probs of all tokens.
        engines: the answers of :meth:`rlhf.interfaces.Generator.logprobs`.
    """
    differences = []
    for i, (canary, ours_T) in enumerate(zip(canaries, ours_N.split([len(c.ids) for c in canaries]), strict=True)):
        first = canary.first
        each = [(torch.tensor(theirs[i][first - 1 :]) - ours_T[first:]).abs().mean() for theirs in engines]
        differences.append(float(torch.stack(each).max()))
    return differences
