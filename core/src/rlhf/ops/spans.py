"""Consecutive pieces of an array: the piece of each position, positions of ranges, sums. Also memory, and copies to a
GPU.

``torch.repeat_interleave`` is not used. It starts every thread even for a few numbers and waits for the slowest, so
each call takes milliseconds on cores that a rank or an engine also uses.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

_HUGE = 2**22
"""Size in bytes from which numpy requests huge pages."""


def owners(counts: Tensor) -> Tensor:
    """int64: ``counts[0]`` times 0, then ``counts[1]`` times 1, and so on.

    Args:
        counts: int64, all > 0.
    """
    ends = torch.cumsum(counts, 0)
    steps = ends.new_zeros(int(ends[-1]) if len(ends) else 0)
    # With a count of 0 two ends would be equal, and one of the two steps would be lost.
    steps[ends[:-1]] = 1
    return steps.cumsum_(0)


def spans(starts: Tensor, counts: Tensor) -> Tensor:
    """int64: ``counts[0]`` numbers from ``starts[0]`` on, then ``counts[1]`` from ``starts[1]`` on, and so on; all
    counts > 0."""
    ends = torch.cumsum(counts, 0)
    steps = ends.new_ones(int(ends[-1]) if len(ends) else 0)
    steps[:1] = starts[:1]
    # Inside a range each number is 1 more than the one before it. At the end of a range the step is the jump to
    # the start of the next one.
    steps[ends[:-1]] = starts[1:] - starts[:-1] - counts[:-1] + 1
    return steps.cumsum_(0)


def repeated(values: Tensor, counts: Tensor) -> Tensor:
    """``values[0]`` repeated ``counts[0]`` times, then ``values[1]``, and so on. Both are on the CPU."""
    return torch.from_numpy(np.repeat(values.numpy(), counts.numpy()))


def sums(mask: Tensor, counts: Tensor) -> Tensor:
    """int64: number of True values among the first ``counts[0]``, then among the next ``counts[1]``, and so on; all
    counts > 0. Both are on the CPU."""
    if not len(counts):
        return torch.zeros(0, dtype=torch.int64)
    starts = torch.cumsum(counts, 0) - counts
    # For an empty range reduceat gives the value at its start, not 0. Therefore counts must be > 0.
    return torch.from_numpy(np.add.reduceat(mask.numpy().view(np.int8), starts.numpy(), dtype=np.int64))


def masked(values: Tensor, mask: Tensor) -> Tensor:
    """``values[mask]``. Both are on the CPU, without gradient. numpy takes a fifth of torch's time."""
    return torch.from_numpy(values.numpy()[mask.numpy()])


def empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """``torch.empty`` on the CPU. A large tensor gets its memory from numpy, which requests huge pages: the first use
    of a page of 4 KiB takes longer than copying it."""
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes < _HUGE:
        return torch.empty(shape, dtype=dtype)
    return torch.from_numpy(np.empty(nbytes, np.uint8)).view(dtype).view(*shape)


def moved(values: Tensor, device: torch.device | str) -> Tensor:
    """``values`` on ``device``. A copy from the CPU to a GPU does not wait for the GPU's pending work."""
    if values.device.type == "cpu" and torch.device(device).type == "cuda":
        return values.pin_memory().to(device, non_blocking=True)
    return values.to(device)
