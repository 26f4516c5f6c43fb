"""Unfinished samples of an engine that is asked in slices, by :meth:`SimulatedGenerator.advance`."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice

from rlhf.types import GenerationRequest


@dataclass(slots=True)
class Sample:
    request: GenerationRequest
    seconds: float
    """Of the whole answer."""
    versions: list[tuple[int, int]]
    """(first token, version of the weights that drew it and its successors)."""
    seconds_left: float = field(init=False)
    """Seconds until the answer is complete."""

    def __post_init__(self) -> None:
        self.seconds_left = self.seconds


class Samples:
    """Args:
    places: samples that are worked on at once; the others wait, in order.
    """

    def __init__(self, places: int) -> None:
        self._places = places
        self.unfinished: dict[int, Sample] = {}

    def advance(self, seconds: float, again: Callable[[], bool]) -> list[tuple[int, Sample]]:
        """Take about ``seconds``; returns the samples that are complete.

        Args:
            again: asked for each of them: whether it is sampled again.
        """
        end, complete = time.monotonic() + seconds, list[tuple[int, Sample]]()
        while self.unfinished:
            running = dict(islice(self.unfinished.items(), self._places))
            step = min(min(sample.seconds_left for sample in running.values()), end - time.monotonic())
            time.sleep(max(0.0, step))
            for name, sample in running.items():
                sample.seconds_left -= max(0.0, step)
                if sample.seconds_left <= 0 and again():
                    sample.seconds_left, sample.versions = sample.seconds, [(0, sample.versions[-1][1])]
                elif sample.seconds_left <= 0:
                    complete.append((name, self.unfinished.pop(name)))
            if time.monotonic() >= end:
                break
        return complete

    def tokens_drawn(self, count: Callable[[GenerationRequest], int]) -> int:
        """Tokens so far of the unfinished samples; ``count``: as for :meth:`change_version`."""
        return sum(round(count(s.request) * (1 - s.seconds_left / s.seconds)) for s in self.unfinished.values())

    def change_version(self, version: int, restart: bool, count: Callable[[GenerationRequest], int]) -> None:
        """New weights draw the tokens that are missing; with ``restart`` all tokens.

        Args:
            count: tokens of the whole answer.
        """
        for sample in self.unfinished.values():
            if restart:
                sample.seconds_left, sample.versions = sample.seconds, [(0, version)]
            elif sample.versions[-1][1] != version:
                tokens = round(count(sample.request) * (1 - sample.seconds_left / sample.seconds))
                sample.versions.append((tokens, version))
