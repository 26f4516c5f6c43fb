"""Images in a sequence of tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from rlhf.types.arrays import IntArray, int_array


@dataclass(frozen=True, slots=True)
class Image:
    """An image and the tokens that stand for it. A model replaces the embeddings of some of these tokens by its view of
    the image. Trainers compute pixels from :attr:`data` themselves, so an image is as small as its file everywhere
    else."""

    data: bytes
    """The content of an image file, such as PNG or JPEG."""
    start: int
    """Position of the first of its tokens."""
    tokens: int
    """Number of its tokens, with those that the model's processor writes around the image."""
    short: IntArray
    """What stands for the image before the model's processor expands it. Engines that expand images themselves get
    these tokens in place of the ``tokens`` others."""

    if TYPE_CHECKING:  # the constructor takes more types than the field has

        def __init__(self, data: bytes, start: int, tokens: int, short: Sequence[int]) -> None: ...

    def __post_init__(self) -> None:
        object.__setattr__(self, "short", int_array(self.short, "Image.short"))

    def moved(self, by: int) -> Image:
        """The image in a sequence in which its tokens are ``by`` positions later."""
        return replace(self, start=self.start + by) if by else self


def joined_images(parts: Iterable[tuple[int, tuple[Image, ...]]]) -> tuple[Image, ...]:
    """The images of parts of a sequence, one after another; ``parts``: (number of tokens, images) of each."""
    all_images: list[Image] = []
    start = 0
    for tokens, images in parts:
        all_images += [image.moved(start) for image in images]
        start += tokens
    return tuple(all_images)
