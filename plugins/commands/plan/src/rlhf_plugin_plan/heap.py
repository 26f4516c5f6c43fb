"""What lives at a moment, and what an allocator keeps of what lived before.

A CPU's is glibc's. Blocks below :data:`LARGE` share a heap: it grows to what lives in it at most and the holes between,
and while a phase lasts something at its end lives, so it stays that large; ``again.py`` says what a later
phase finds of it. Larger blocks are mapped one by one and given back when they are freed. So a process takes its
largest heap and its most large blocks, though these are not of the same moment.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

CHURN = 0.1
"""What a GPU's allocator holds beyond what lives, as a share of what comes and goes: an allowance."""
LARGE = 32 * 2**20
"""Bytes from which on glibc maps a block of its own (``M_MMAP_THRESHOLD``, which grows up to here)."""
HOLES = 1 / 3
"""Holes of the heap that nothing fits into, as a share of what lives in it at most. An allocator in its steady state
has half as many holes as blocks (Knuth, The Art of Computer Programming, 2.5: the fifty-percent rule), and smaller
ones: two thirds of a block was measured (docs/plan.md)."""


@dataclass(frozen=True, slots=True)
class Size:
    """Bytes that live at one moment."""

    all: int = 0
    heap: int = 0
    """Those in tensors smaller than :data:`LARGE`."""


def tensors(count: float, each: float) -> Size:
    """``count`` bytes in tensors of ``each``."""
    return Size(int(count), int(count) if each < LARGE else 0)


def total(sizes: Iterable[Size]) -> Size:
    found = list(sizes)
    return Size(sum(s.all for s in found), sum(s.heap for s in found))


def kept(moments: Iterable[Size], rest: Size) -> int:
    """Bytes of the heap beside ``rest`` after these moments, on a CPU: its largest, and :data:`HOLES` x all of it.

    Args:
        rest: what lives in every moment, beside it.
    """
    largest = max(m.heap for m in moments)
    return largest + int(HOLES * (rest.heap + largest))


def allocator(moments: Sequence[Size], rest: Size, device: str) -> int:
    """What a process holds beyond the fullest of ``moments``.

    On a CPU the heap that is :func:`kept` and the most large blocks of any moment are there, and the fullest moment is
    less. On a GPU :data:`CHURN` x the fullest moment.
    """
    fullest = max(m.all for m in moments)
    if device != "cpu":
        return int(CHURN * fullest)
    return kept(moments, rest) + max(m.all - m.heap for m in moments) - fullest
