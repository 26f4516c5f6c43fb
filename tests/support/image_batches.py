"""Batches with images, and a plain statement of what an image-text model computes for their sequences."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch
from rlhf.ops.batch import Batch
from rlhf.ops.packing import SequenceData, UnitData, pack
from rlhf.ops.reduce import weigh
from rlhf.types import Image
from rlhf_hub.processors import load_processor, open_image
from rlhf_testing.image_models import FAMILIES, drawing
from torch import Tensor

from tests.support.losses import NllLoss

SHARES = (([1, 2, 0], [5], [3]), ([5], [1], [4, 6]))
"""[rank][micro-batch][unit] of a batch: one rank has images and the other none, no rank has some, both have some. Units
are repeated, so the sums are those of :data:`WHOLE`."""
UNITS = [unit for of_rank in SHARES for micro in of_rank for unit in micro]

Part = str | bytes
"""Text, or an image file."""

RED, BLUE, GREEN, SMALL = (
    drawing(),
    drawing(64, 48, "blue"),
    drawing(32, 64, "green"),
    drawing(32, 32, "blue"),
)
SEQUENCES: tuple[tuple[Part, ...], ...] = (
    ("hello ", RED, " what?"),
    ("just text",),
    ("two: ", BLUE, " and ", GREEN, "!"),
    ("hello ", BLUE, " what?"),
    ("x", RED, "y", RED, "z"),
    ("more text, which is longer",),
    ("hello ", SMALL, " what?"),
)
"""Equal tokens with other images, several images, one image twice, text alone."""


class PlainImageModel:
    """transformers' own model and processor, one sequence at a time."""

    def __init__(self, path: Path, family: str) -> None:
        from transformers import AutoModelForImageTextToText

        self.path, self.placeholder = path, FAMILIES[family][3]
        self.model: Any = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32).eval()

    def inputs(self, parts: tuple[Part, ...]) -> dict[str, Tensor]:
        return _processed(self.path, self.placeholder, parts)

    def logprobs(self, parts: tuple[Part, ...]) -> Tensor:
        """[T]: of each token given those before it; 0 for the first."""
        inputs = self.inputs(parts)
        logits_TV = self.model(**inputs, use_cache=False).logits[0]
        ids_T = inputs["input_ids"][0]
        logprobs_T = logits_TV[:-1].log_softmax(-1).gather(1, ids_T[1:, None])[:, 0]
        return torch.cat([logprobs_T.new_zeros(1), logprobs_T])


@cache
def processor_of(path: Path) -> Any:
    return load_processor(str(path))


def _processed(path: Path, placeholder: str, parts: tuple[Part, ...]) -> dict[str, Tensor]:
    pictures = [open_image(part) for part in parts if isinstance(part, bytes)]
    text = "".join(part if isinstance(part, str) else placeholder for part in parts)
    return dict(processor_of(path)(text=[text], images=pictures or None, return_tensors="pt"))


def sequence(path: Path, family: str, parts: tuple[Part, ...]) -> tuple[list[int], tuple[Image, ...]]:
    """The tokens of a sequence and its images."""
    ids: list[int] = []
    images: list[Image] = []
    placeholder = FAMILIES[family][3]
    for part in parts:
        image_ids = _processed(path, placeholder, (part,))["input_ids"][0].tolist()
        if isinstance(part, bytes):
            short = processor_of(path).tokenizer(placeholder)["input_ids"]
            images.append(Image(part, len(ids), len(image_ids), short))
        ids += image_ids
    return ids, tuple(images)


def image_batch(path: Path, family: str, sequences: tuple[tuple[Part, ...], ...] = SEQUENCES) -> Batch:
    """A batch for :class:`~tests.support.losses.NllLoss`: one unit per sequence, all tokens of text are taught."""
    units = []
    for parts in sequences:
        ids, images = sequence(path, family, parts)
        taught = [n > 0 for n in range(len(ids))]
        for image in images:
            taught[image.start : image.start + image.tokens] = [False] * image.tokens
        units.append(UnitData([SequenceData(ids, {"loss_mask": taught}, images=images)]))
    return weigh(pack(units), NllLoss().reduce())


def image_shares(full_batch: Batch, ranks: int) -> list[list[Batch]]:
    """[rank][micro-batch] of ``image_batch`` by :data:`SHARES`, with the weights of :data:`WHOLE` as one batch."""
    batch = weigh(full_batch.select(UNITS), NllLoss().reduce())
    places = iter(range(len(UNITS)))
    dealt = [[batch.select([next(places) for _ in micro]) for micro in of_rank] for of_rank in SHARES]
    return dealt if ranks == 2 else [[micro for of_rank in dealt for micro in of_rank]]
