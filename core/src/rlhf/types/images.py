"""Images in a sequence of tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from rlhf.types.arrays import IntArray, int_array


@dataclass(frozen=True, slots=True)
class Image:
    """An image and the tokens that stand for it. A model replaces the embeddings of some of these tokens by features of
    the image. Trainers compute pixels from :attr:`data` themselves, so everywhere else an image is as small as its
    file."""

    data: bytes
    """The content of an image file, such as PNG or JPEG."""
    start: int
    """Position of the first of its tokens."""
    tokens: int
    """Number of its tokens, including those that the model's processor adds around the image."""
    short: IntArray
    """The tokens that stand for the image before the model's processor expands it. Engines that expand images
    themselves get these instead of all ``tokens``."""

    if TYPE_CHECKING:  # the constructor takes more types than the field has

        def __init__(self, data: bytes, start: int, tokens: int, short: Sequence[int]) -> None: ...

    def __post_init__(self) -> None:
        object.__setattr__(self, "short", int_array(self.short, "Image.short"))

    def moved(self, by: int) -> Image:
        """The image with its tokens ``by`` positions later in the sequence."""
        return replace(self, start=self.start + by) if by else self


def joined_images(parts: Iterable[tuple[int, tuple[Image, ...]]]) -> tuple[Image, ...]:
    """The images of consecutive parts of a sequence; ``parts``: (number of tokens, images) of each."""
    all_images: list[Image] = []
    start = 0
    for tokens, images in parts:
        all_images += [image.moved(start) for image in images]
        start += tokens
    return tuple(all_images)
