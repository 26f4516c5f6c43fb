"""Positions of pieces that lie one after another: which piece each belongs to, and where the pieces were before.

Not by ``torch.repeat_interleave``, which wakes every thread even for a few numbers and then waits for the slowest: on
cores that a rank or an engine computes on too, each of its calls takes milliseconds.
"""

from __future__ import annotations

import torch
from torch import Tensor


def owners(counts: Tensor) -> Tensor:
    """int64: 0 as often as ``counts[0]`` says, then 1 as often as ``counts[1]``, and so on.

    Args:
        counts: int64, all > 0.
    """
    ends = torch.cumsum(counts, 0)
    steps = ends.new_zeros(int(ends[-1]) if len(ends) else 0)
    steps[ends[:-1]] = 1
    return torch.cumsum(steps, 0)


def spans(starts: Tensor, counts: Tensor) -> Tensor:
    """int64: ``counts[0]`` numbers from ``starts[0]`` on, then ``counts[1]`` from ``starts[1]`` on, and so on; all
    counts > 0."""
    shift = starts - (torch.cumsum(counts, 0) - counts)
    of = owners(counts)
    return shift[of] + torch.arange(len(of), device=of.device)
