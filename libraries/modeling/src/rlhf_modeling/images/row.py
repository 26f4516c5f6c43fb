"""The inputs of an image-text model for a row of packed sequences with images.

Shape suffixes: N tokens of the row, T tokens of one sequence, B sequences.
"""

from __future__ import annotations

import inspect
import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch
from rlhf.errors import TrainingError
from rlhf.ops.spans import moved
from rlhf.types import Image
from torch import Tensor, nn

from rlhf_modeling.images.pixels import PixelReader, Pixels, joined
from rlhf_modeling.shared_prefixes import Shared

BLANK = 32
"""Height and width in pixels of the blank image in rows without images."""

MISFIT = (
    "The tokens of an image were created with a different image processor than the one in the model's folder, or were "
    "truncated."
)


@dataclass(frozen=True, slots=True)
class Count:
    """Numbers of one image."""

    sequence: int
    """Number of its sequence in the row."""
    placeholders: int
    """Number of tokens whose embeddings are replaced by the features of the image."""
    parts: int
    """Number of parts into which the image processor divided it."""


@dataclass(slots=True)
class ImageRow:
    arguments: dict[str, Tensor]
    """``input_ids`` [1, N], ``position_ids`` and the pixels. Positions are [1, N], or [4, 1, N] if they have three
    axes: text, time, height, width."""
    lens: list[int]
    """Lengths of the row's sequences. All their tokens are computed unless prefixes are shared."""
    deltas: list[int]
    """For each sequence: position of the next token, minus the number of its tokens."""
    counts: list[Count]
    """Counts of each image, in the order of the row. An image that sequences share counts once."""
    plain_N: Tensor | None = None
    """The ids with sampled placeholders, if there are any (:meth:`ImageInputs.image_context`)."""

    def as_rows(self, count: int) -> dict[str, Tensor]:
        """The arguments for ``count`` sequences of equal length as rows without packing."""
        arguments = {**self.arguments, "input_ids": self.arguments["input_ids"].view(count, -1)}
        position = arguments.pop("position_ids")
        return arguments if position.ndim == 2 else {**arguments, "position_ids": position.view(4, count, -1)}


class ImageInputs:
    """Creates rows for one model.

    Args:
        module: the image-text model.
        body: the part of the model that returns hidden states.
        processor: the processor in the model's folder.
    """

    def __init__(self, module: Any, body: Any, processor: Any) -> None:
        self.pixels = PixelReader(processor, frozenset(inspect.signature(body.forward).parameters))
        self.token = int(module.config.image_token_id)
        """Id of the placeholder: a token whose embedding is replaced by a feature of the image."""
        self._embedding: nn.Module = module.get_input_embeddings()
        self._body = body
        self._counts: list[Count] = []
        rope = getattr(body, "get_rope_index", None)
        self._rope: Any = rope
        """Set if positions have three axes: returns the positions of a sequence."""
        self._rope_reads = set() if rope is None else set(inspect.signature(rope).parameters)
        self._features = body.get_image_features
        body.get_image_features = self._checked

    @cached_property
    def blank(self) -> tuple[Tensor, Image]:
        """A sequence of the placeholders of a small blank image, and the image."""
        from PIL import Image as Picture

        file = io.BytesIO()
        Picture.new("RGB", (BLANK, BLANK), (127, 127, 127)).save(file, "PNG")
        image = Image(file.getvalue(), 0, 0, [self.token])
        device = next(self._body.parameters()).device
        with torch.no_grad():
            features = self._features(**joined(self.pixels.collect([image]), device), return_dict=True).pooler_output
        count = sum(_rows(part) for part in features)
        return torch.full((count,), self.token), Image(image.data, 0, count, [self.token])

    def row(
        self,
        ids_N: Tensor,
        position_N: Tensor,
        lens: Sequence[int],
        images_B: Sequence[tuple[Image, ...]],
        shared: Shared | None = None,
    ) -> ImageRow:
        """The row of sequences with these lengths.

        Args:
            images_B: the images of each sequence. If it is empty, the row gets an extra sequence with a blank image,
                whose hidden states have no meaning.
            shared: the row has the computed tokens of these sequences.
        """
        lens, images_B = list(lens), list(images_B)
        if not images_B:
            more_T, image = self.blank
            ids_N = torch.cat([ids_N, more_T.to(ids_N.device)])
            position_N = torch.cat([position_N, torch.arange(len(more_T), device=ids_N.device)])
            images_B = [()] * len(lens) + [(image,)]
            lens.append(len(more_T))
        # Pixels, placeholders and positions, sequence by sequence.
        pixels = iter(self.pixels.collect([image for images in images_B for image in images]))
        positions: list[Tensor] = []
        kinds: list[Tensor] = []
        deltas: list[int] = []
        by_place: dict[int, tuple[Count, Pixels]] = {}  # by the position of the image's first token in the row
        start = 0
        for b, (ids_T, position_T) in enumerate(zip(ids_N.cpu().split(lens), position_N.split(lens), strict=True)):
            sequence_pixels = [next(pixels) for _ in images_B[b]]
            kind_T, counts = self._placeholders(b, ids_T, images_B[b], sequence_pixels)
            for image, count, values in zip(images_B[b], counts, sequence_pixels, strict=True):
                place = start + image.start
                by_place.setdefault(place if shared is None else int(shared.place_N[place]), (count, values))
            try:
                position, delta = self._positions(ids_T, position_T, kind_T, sequence_pixels)
            except Exception as cause:  # the model's code fails on sequences that do not fit their images
                raise TrainingError(
                    f"sequence {b} of a micro-batch has {int(kind_T.sum())} placeholder tokens, which do not fit its "
                    f"{len(sequence_pixels)} images ({type(cause).__name__}: {cause}). {MISFIT}"
                ) from cause
            kinds.append(kind_T)
            positions.append(position)
            deltas.append(delta)
            start += lens[b]
        # The row: each image once, in the order of its tokens.
        images = [by_place[place] for place in sorted(by_place)]
        kind_N, position_N = torch.cat(kinds).to(ids_N.device), torch.cat(positions, -1).to(ids_N.device)
        if shared is not None:
            ids_N, kind_N, position_N = (x[..., shared.source_M] for x in (ids_N, kind_N, position_N))
        sampled_N = (ids_N == self.token) & ~kind_N
        plain_N = ids_N if bool(sampled_N.any()) else None
        # Some id that is not the placeholder. Its embedding is not used (:meth:`image_context`).
        other = 1 if self.token == 0 else 0
        arguments = {
            "input_ids": torch.where(sampled_N, other, ids_N)[None],
            "position_ids": position_N[..., None, :],
            **joined([values for _, values in images], ids_N.device),
        }
        return ImageRow(arguments, lens, deltas, [count for count, _ in images], plain_N)

    @contextmanager
    def image_context(self, row: ImageRow) -> Iterator[None]:
        """Context in which the model computes ``row``. A placeholder outside of the images, which a policy may sample,
        keeps its own embedding. The model would search for an image."""
        hook = None
        if (plain_N := row.plain_N) is not None:
            hook = self._embedding.register_forward_pre_hook(
                lambda _, arguments: (moved(plain_N, arguments[0].device).view(arguments[0].shape),)
            )
        self._counts = row.counts
        try:
            yield
        finally:
            self._counts = []
            if hook is not None:
                hook.remove()

    # -------------------------------------------------------------------- placeholders and positions

    def _placeholders(
        self, b: int, ids_T: Tensor, images: Sequence[Image], pixels: Sequence[Pixels]
    ) -> tuple[Tensor, list[Count]]:
        """(bool [T]: placeholders of the images of sequence ``b``; the counts of each image)."""
        kind_T, counts = torch.zeros(len(ids_T), dtype=torch.bool), []
        for image, inputs in zip(images, pixels, strict=True):
            span = slice(image.start, image.start + image.tokens)
            kind_T[span] = ids_T[span] == self.token
            values = inputs["pixel_values"]
            counts.append(Count(b, int(kind_T[span].sum()), values.shape[1] if values.ndim == 5 else 1))
        return kind_T, counts

    def _positions(self, ids_T: Tensor, position_T: Tensor, kind_T: Tensor, pixels: list[Pixels]) -> tuple[Tensor, int]:
        """([T] or [4, T], :attr:`ImageRow.deltas`)."""
        if self._rope is None:
            return position_T, 0
        if not pixels:
            return position_T.expand(4, -1), 0
        grids = {name: x for name, x in joined(pixels, torch.device("cpu")).items() if name in self._rope_reads}
        place_31T, delta_11 = self._rope(ids_T[None], mm_token_type_ids=kind_T[None].int(), **grids)
        return torch.cat([position_T[None], place_31T[:, 0].to(position_T)]), int(delta_11)

    def _checked(self, *args: Any, **options: Any) -> Any:
        """The features of the images. Raises TrainingError if an image does not have as many placeholders as
        features."""
        out = self._features(*args, **options)
        sizes = [_rows(part) for part in out.pooler_output]
        parts = [1] * len(self._counts) if len(sizes) == len(self._counts) else [c.parts for c in self._counts]
        ends = list(accumulate(parts, initial=0))
        complete = ends[-1] == len(sizes)
        for i, count in enumerate(self._counts):
            features = sum(sizes[ends[i] : ends[i + 1]])
            if complete and features != count.placeholders:
                raise TrainingError(
                    f"sequence {count.sequence} of a micro-batch has an image with {count.placeholders} placeholder "
                    f"tokens, but the model has {features} features for it. {MISFIT}"
                )
        placeholders = sum(count.placeholders for count in self._counts)
        if self._counts and sum(sizes) != placeholders:
            raise TrainingError(
                f"a micro-batch has images with {placeholders} placeholder tokens, but the model has {sum(sizes)} "
                f"features for them. {MISFIT}"
            )
        return out


def _rows(feature: Tensor) -> int:
    return feature.numel() // feature.shape[-1]
