"""Mismatched answers: which answer a prompt gets that is not its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rlhf.types.examples import Sequence as TokenSequence

TWIN_MASK = "twin_mask"
"""Token mask of the mismatched answers; ``loss_mask`` is that of the rows' own."""
ANSWER, TWIN = 0, 1
"""Roles of the sequences of a unit."""


@dataclass(frozen=True, slots=True)
class Labelled:
    """One answer with its label, cut where the answer begins."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    mask: tuple[bool, ...]
    """Of the answer's tokens: which are trained on."""
    desirable: bool
    place: tuple[int, str, int]
    """Fixed by the row alone, whatever the order in a batch: side of a pair, source, index."""

    @classmethod
    def of(cls, sequence: TokenSequence, desirable: bool, place: tuple[int, str, int]) -> Labelled:
        """Of a sequence with at least one trained token."""
        start = sequence.loss_mask.index(True)
        ids, mask = tuple(sequence.ids), tuple(sequence.loss_mask)
        return cls(ids[:start], ids[start:], mask[start:], desirable, place)


def twins(rows: Sequence[Labelled]) -> list[int | None]:
    """For each row the one whose answer its prompt gets: the nearest before it, in the order of their places, with the
    last before the first. That is a row of another prompt; where all prompts are equal, one with another answer; None
    where all rows are equal.

    A function of the set of rows: their order in ``rows`` does not matter.
    """
    order = sorted(range(len(rows)), key=lambda i: (rows[i].place, rows[i].prompt, rows[i].answer))
    several = len({row.prompt for row in rows}) > 1
    found: list[int | None] = [None] * len(rows)
    for at, i in enumerate(order):
        for k in range(1, len(order)):
            other = rows[order[at - k]]
            if other.prompt != rows[i].prompt if several else other.answer != rows[i].answer:
                found[i] = order[at - k]
                break
    return found
