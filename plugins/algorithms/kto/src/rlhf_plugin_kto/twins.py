"""Mismatched answers: choose an answer of another row for each prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rlhf.types import Image
from rlhf.types.examples import Sequence as TokenSequence

TWIN_MASK = "twin_mask"
"""Token mask of the mismatched answers. ``loss_mask`` is the mask of the rows' own answers."""
ANSWER, TWIN = 0, 1
"""Roles of the sequences of a unit."""


@dataclass(frozen=True, slots=True)
class Labelled:
    """One answer with its label, split at the start of the answer."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    mask: tuple[bool, ...]
    """Whether each token of the answer is trained on."""
    desirable: bool
    place: tuple[int, str, int]
    """Sort key that depends on the row only, not on the order in a batch: side of a pair, source, index."""
    images: tuple[Image, ...] = ()
    """Images of the prompt."""
    later_images: tuple[Image, ...] = ()
    """Images of ``answer``, which may contain other messages between answers. Their positions count from its first
    token."""

    @classmethod
    def of(cls, sequence: TokenSequence, desirable: bool, place: tuple[int, str, int]) -> Labelled:
        """The labelled answer of a sequence with at least one trained token."""
        start = sequence.loss_mask.index(True)
        ids, mask = tuple(sequence.ids), tuple(sequence.loss_mask)
        prompt_images = tuple(image for image in sequence.images if image.start < start)
        answer_images = tuple(image.moved(-start) for image in sequence.images if image.start >= start)
        return cls(ids[:start], ids[start:], mask[start:], desirable, place, prompt_images, answer_images)

    def cut(self, room: int) -> Labelled:
        """A copy with at most ``room`` tokens of the answer. An image that would be cut is dropped completely."""
        end = next((image.start for image in self.later_images if image.start + image.tokens > room), room)
        images = tuple(image for image in self.later_images if image.start < end)
        return replace(self, answer=self.answer[:end], mask=self.mask[:end], later_images=images)

    def images_before(self, other: Labelled) -> tuple[Image, ...]:
        """The images of this prompt followed by the answer of ``other``."""
        return (*self.images, *(image.moved(len(self.prompt)) for image in other.later_images))

    @property
    def question(self) -> tuple[tuple[int, ...], tuple[bytes, ...]]:
        """Prompt and images."""
        return self.prompt, tuple(image.data for image in self.images)


def twins(rows: Sequence[Labelled]) -> list[int | None]:
    """For each row, the row whose answer its prompt gets. This is the nearest earlier row in the order of ``place``
    (cyclic: the last row precedes the first) with another prompt. If all prompts are equal, it is the nearest with
    another answer. None if all rows are equal.

    The result depends on the set of rows, not on their order in ``rows``.
    """
    order = sorted(range(len(rows)), key=lambda i: (rows[i].place, rows[i].prompt, rows[i].answer))
    prompts_differ = len({row.question for row in rows}) > 1
    partners: list[int | None] = [None] * len(rows)
    for position, i in enumerate(order):
        for k in range(1, len(order)):
            # Negative positions count from the end: the order is cyclic.
            other = rows[order[position - k]]
            if other.question != rows[i].question if prompts_differ else other.answer != rows[i].answer:
                partners[i] = order[position - k]
                break
    return partners
