"""Comparisons of the numbers of ranks with those of one rank."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from rlhf_testing.contract import expect
from torch import Tensor

from tests.support.rank_batches import apart

STEP = 1e-4
"""Relative difference of losses and norms of steps: AdamW amplifies differences in gradients near zero."""


def equal(value: Any, want: Any, label: str) -> None:
    """Fails unless both are equal."""
    expect(value == want, f"{label}: must be {want}, got {value}")


def near(
    value: float | Sequence[float], want: float | Sequence[float], tolerance: float, label: str, floor: float = 1e-12
) -> None:
    """Fails unless numbers differ by at most ``tolerance``, relative to ``want``, or by ``floor``."""
    gots, wants = ([x] if isinstance(x, int | float) else x for x in (value, want))
    pairs = list(zip(gots, wants, strict=True))
    far = [(a, b) for a, b in pairs if not abs(a - b) <= max(tolerance * abs(b), floor)]
    expect(not far, f"{label}: got {value}, must be {want} within {tolerance:g}")


def close(tensors: Mapping[str, Tensor], want: Mapping[str, Tensor], tolerance: float, label: str) -> None:
    """Fails unless the tensors have equal names, and differ norm-wise by less than ``tolerance``."""
    expect(tensors.keys() == want.keys(), f"{label}: other tensors: {sorted(tensors.keys() ^ want.keys())}")
    difference = apart(dict(tensors), dict(want))
    expect(
        difference < tolerance, f"{label}: differ by {difference:.1e} from those of one rank (allowed {tolerance:.0e})"
    )


def same_bits(tensors: Mapping[str, Tensor], want: Iterable[tuple[str, Tensor]], label: str) -> None:
    """Fails unless ``tensors`` has every tensor of ``want``, bit for bit."""
    other = [name for name, tensor in want if name not in tensors or not torch.equal(tensors[name], tensor)]
    expect(not other, f"{label}: {other[:3]} and {len(other[3:])} more differ")


def check_steps(
    steps_of_ranks: Sequence[Sequence[Sequence[Any]]],
    want: Sequence[Any],
    loss: float = STEP,
    norm: float = STEP,
    least: float = STEP,
    share: int = 1,
) -> None:
    """Fails unless the steps of ranks are those of one rank.

    Args:
        steps_of_ranks: [rank][step]: loss on this rank, norm, rate, reason of a skip.
        want: [step]: the sums and the result of one rank.
        loss, norm: allowed relative differences; ``least``: allowed difference of a loss near zero.
        share: number of ranks that compute the same.
    """
    equal([len(steps) for steps in steps_of_ranks], [len(want)] * len(steps_of_ranks), "steps of each rank")
    for number, (sums, result) in enumerate(want):
        losses, *columns = zip(*(steps[number] for steps in steps_of_ranks), strict=True)
        for values, label in zip(columns, ("norm", "learning rate", "reason of a skip"), strict=True):
            equal(values, (values[0],) * len(steps_of_ranks), f"step {number}: the {label} on each rank")
        replicas = [losses[start : start + share] for start in range(0, len(losses), share)]
        equal([*map(set, replicas)], [{group[0]} for group in replicas], "losses of the ranks that compute the same")
        near(sum(losses[::share]), sums["loss"][0], loss, f"step {number}: the sum of the losses", least)
        near(columns[0][0], result.grad_norm, norm, f"step {number}: the norm")
        equal((columns[1][0], columns[2][0]), (result.lr, ""), f"step {number}: learning rate, and reason of a skip")
