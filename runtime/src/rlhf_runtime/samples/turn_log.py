"""The sampled turns of an unfinished sample. A resumed run does not sample them again."""

from __future__ import annotations

import zlib
from collections.abc import Iterable

from rlhf.types import GenerationRequest, Turn


class TurnLog:
    """Turns by their number, each with a checksum of the context that it answers.

    A resumed sample runs its rollout from the beginning, and its environment gets the same actions. As long as the
    contexts are the same, the turns come from here. From the first different context on they are sampled again.
    """

    def __init__(self, turns: Iterable[tuple[int, int, Turn]] = ()) -> None:
        """``turns``: (number, checksum of its context, turn)."""
        self._turns = {number: (context, turn) for number, context, turn in turns}

    def find(self, number: int, request: GenerationRequest) -> Turn | None:
        """The turn ``number``, if it was sampled before for the same context."""
        context, turn = self._turns.get(number, (-1, None))
        if turn is not None and context != checksum(request):
            self._turns = {n: earlier for n, earlier in self._turns.items() if n < number}
            return None
        return turn

    def add(self, number: int, request: GenerationRequest, turn: Turn) -> None:
        self._turns[number] = checksum(request), turn

    def entries(self) -> list[tuple[int, int, Turn]]:
        """(number, checksum of its context, turn), in order."""
        return [(number, context, turn) for number, (context, turn) in sorted(self._turns.items())]


def checksum(request: GenerationRequest) -> int:
    """CRC-32 of the context, its images included, and the sampling parameters."""
    return zlib.crc32(repr(request.sampling).encode(), zlib.crc32(request.context_key))
