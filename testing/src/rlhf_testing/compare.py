"""Comparisons for the suites: norm-wise for gradients, bit for bit for values that must not change. Also ways to split
a batch."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from rlhf_testing.contract import expect

GRADIENT = 1e-5
"""Norm-wise relative difference of two gradients that are equal in exact arithmetic. A policy-gradient loss is near
zero by construction, so the loss itself has no meaningful relative error."""
LOSS = 1e-6
"""Allowed loss difference, relative to ``sum |weight * value|``. The terms of a loss may cancel, so the loss itself
does not measure rounding."""

_ODD = 0x5EED0DD
"""A seed that no plugin is likely to use."""


def distance(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> float:
    """``|a - b| / max(|a|, |b|)`` over all tensors together; 0 where both are zero. Names must agree."""
    expect(set(a) == set(b), f"the gradients are of different parameters: {sorted(set(a) ^ set(b))}")
    difference = sum(float((a[k].double() - b[k].double()).square().sum()) for k in a) ** 0.5
    size = max(norm(a), norm(b))
    return difference / size if size > 0 else difference


def norm(a: Mapping[str, Tensor]) -> float:
    """The 2-norm over all tensors together, in float64."""
    return sum(float(v.double().square().sum()) for v in a.values()) ** 0.5


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal shape, dtype and every bit of every value (NaN equals NaN, 0 is not -0)."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    # torch.equal() on floats: NaN differs from NaN, and 0 equals -0
    return bool(torch.equal(_bytes(a), _bytes(b)))


def _bytes(a: Tensor) -> Tensor:
    return a.detach().contiguous().view(-1).view(torch.uint8)


@contextmanager
def generators_left_alone(label: str) -> Iterator[None]:
    """Fails if the code inside uses or seeds a global random generator. A model's dropout, for example, uses torch's
    generator."""
    states = torch.get_rng_state(), random.getstate()
    torch.manual_seed(_ODD)  # an unusual seed, so that seeding again is noticed
    random.seed(_ODD)
    torchs, pythons = torch.get_rng_state(), random.getstate()
    try:
        yield
        moved = [] if torch.equal(torchs, torch.get_rng_state()) else ["torch's"]
        moved += [] if pythons == random.getstate() else ["random's"]
    finally:
        torch.set_rng_state(states[0])
        random.setstate(states[1])
    expect(
        not moved,
        f"{label} draws from or seeds {' and '.join(moved)} global random generator. Use a separate random generator: "
        "torch.Generator().manual_seed(n), random.Random(n)",
    )


def finite(a: Mapping[str, Tensor]) -> list[str]:
    """Names of tensors that hold NaN or infinity."""
    return sorted(k for k, v in a.items() if not bool(torch.isfinite(v).all()))


def layouts(units: int) -> dict[str, list[list[int]]]:
    """Ways to lay out an optimizer batch, by name: {layout: [units of each micro-batch, ...]}.

    Gradients of ranks add like gradients of micro-batches, so a split over ranks is tested as a split into
    micro-batches."""
    order = list(range(units))
    shuffled = order[:]
    random.Random(0).shuffle(shuffled)
    return {
        "one unit a micro-batch": [[u] for u in order],
        "two ranks": [part for part in (order[: units // 2], order[units // 2 :]) if part],
        "reversed packing order": [order[::-1]],
        "shuffled over three ranks": [part for part in (shuffled[i::3] for i in range(3)) if part],
    }


def padded(values_N: Tensor, positions: Sequence[Tensor], width: int) -> Tensor:
    """[N, ...] -> [B, T, ...]: row b holds the tokens ``positions[b]``, then zeros. Differentiable."""
    rows = []
    for index in positions:
        row = values_N[index]
        rows.append(torch.cat([row, row.new_zeros((width - row.shape[0], *row.shape[1:]))]))
    return torch.stack(rows)
