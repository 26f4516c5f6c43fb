"""Prefixes that sequences share are computed once: the samples of a prompt, the answers of a pair, a common preamble.

Under causal attention what a model computes for a token depends on that token and the ones before it. Tokens of
different sequences with the same ids up to and including themselves are therefore one computation. They are found by
their ids alone: sort the sequences; what one shares with any before it, it shares with its predecessor. So each
sequence computes the tokens behind that shared front, and attends to the places of all of its tokens::

    a b c d e        5 tokens: places 0 1 2 3 4
    a b c x y        2 more:          0 1 2 5 6
    a b c x z w      2 more:          0 1 2 5 7 8

Shape suffixes: N tokens of B sequences, M <= N computed tokens, U units.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from rlhf.ops.batch import Batch
from rlhf.ops.spans import owners

LEAST = 4
"""A shorter front is computed again: fetching its keys costs as much as it saves."""
GAIN = 1 / 50
"""Where less than this part of all tokens would be saved nothing is shared, for the same reason."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """The tokens of one sequence that are computed for it: all behind a front that another sequence computes."""

    start: int
    """Its first computed token among the M."""
    skip: int
    """Tokens of the front, 0 where it shares nothing."""
    length: int
    """Tokens of the whole sequence; ``length - skip`` are computed."""
    at: int
    """The sequence's first token among the N."""


@dataclass(frozen=True, slots=True)
class Shared:
    """What is computed of packed sequences; see the module's example."""

    ids_M: Tensor
    """int64."""
    position_M: Tensor
    """int64: of each computed token in its sequence."""
    place_N: Tensor
    """int64: where each original token is computed."""
    stretches: tuple[Stretch, ...]
    """In the order of the M; sequences that others compute wholly have none."""


@dataclass(frozen=True, slots=True)
class UnitPrefixes:
    """What units cost alone and side by side."""

    tokens: list[int]
    """[U]: computed tokens of each unit alone."""
    order: list[int]
    """The units, those that share a prefix side by side."""
    shared: list[int]
    """[U]: tokens that unit ``order[i]`` need not compute where ``order[i - 1]`` is in the same micro-batch; all zero
    where they are too few to matter."""


def share_prefixes(ids_N: Tensor, lens: Sequence[int]) -> Shared | None:
    """Which tokens to compute; None where no two sequences share enough of a front.

    Args:
        ids_N: int64, on any device; the result is on the same.
        lens: tokens of each sequence; they sum to N.
    """
    ids = ids_N.cpu()
    starts = [0, *accumulate(lens)][:-1]
    order, fronts = _sorted(ids, starts, lens, range(len(lens)))
    if sum(fronts) < max(1, GAIN * len(ids)):
        return None
    place_N, every_N = torch.empty_like(ids), torch.arange(len(ids))
    places, every = place_N.numpy(), every_N.numpy()
    stretches: list[Stretch] = []
    end, before = 0, 0
    for b, front in zip(order, fronts, strict=True):
        at, own = starts[b], lens[b] - front
        places[at : at + front] = places[before : before + front]
        places[at + front : at + lens[b]] = every[end : end + own]
        if own:
            stretches.append(Stretch(end, front, lens[b], at))
        end, before = end + own, at
    source_M = torch.empty(end, dtype=torch.int64)
    source_M[place_N] = every_N  # any of those that share a place: their ids and positions are equal
    position_N = every_N - torch.tensor(starts)[owners(torch.tensor(lens))]
    device = ids_N.device
    ids_M, position_M = ids[source_M], position_N[source_M]
    return Shared(ids_M.to(device), position_M.to(device), place_N.to(device), tuple(stretches))


def unit_prefixes(batch: Batch) -> UnitPrefixes:
    """What every unit costs, and which units should be computed together. ``batch`` is on the CPU."""
    lens, starts = batch.lens_B.tolist(), batch.starts_B.tolist()
    units = batch.unit_B.tolist()
    tokens = batch.tokens_per_unit()
    first: dict[int, int] = {}
    for b, unit in enumerate(units):
        first.setdefault(unit, b)
    if len(first) < len(lens):
        order, fronts = _sorted(batch.ids_N, starts, lens, range(len(lens)), units)
        for b, front in zip(order, fronts, strict=True):
            tokens[units[b]] -= front
    order, fronts = _sorted(batch.ids_N, starts, lens, list(first.values()))
    if batch.tokens - sum(tokens) + sum(fronts) < GAIN * batch.tokens:
        return UnitPrefixes(batch.tokens_per_unit(), list(range(batch.units)), [0] * batch.units)
    return UnitPrefixes(tokens, [units[b] for b in order], fronts)


def take_rows(x: Tensor, index: Tensor) -> Tensor:
    """``x[index]`` along the first dimension, with a gradient that adds up where a row is taken several times.

    On a CPU ``index_select`` takes half the time, forward and backward; on a GPU only indexing adds in a fixed order.
    """
    return x.index_select(0, index) if x.device.type == "cpu" else x[index]


def _sorted(
    ids: Tensor, starts: Sequence[int], lens: Sequence[int], which: Sequence[int], group: Sequence[int] | None = None
) -> tuple[list[int], list[int]]:
    """The sequences ``which`` in an order that puts those with a common front side by side, and how many tokens each
    has in common with the one before it (0 where fewer than :data:`LEAST`, or where their ``group`` differs)."""
    array = ids.numpy()
    raw = {b: array[starts[b] : starts[b] + lens[b]].tobytes() for b in which}
    order = sorted(which, key=raw.__getitem__ if group is None else lambda b: (group[b], raw[b]))
    if len(order) < 2:
        return order, [0] * len(order)
    one, two = order[:-1], order[1:]
    least_P = torch.tensor([min(lens[a], lens[b]) for a, b in zip(one, two, strict=True)])
    end_P = torch.cumsum(least_P, 0)
    pair = owners(least_P)
    offset = torch.arange(int(end_P[-1])) - (end_P - least_P)[pair]
    start_P2 = torch.tensor([[starts[a], starts[b]] for a, b in zip(one, two, strict=True)])
    differ = (ids[start_P2[:, 0][pair] + offset] != ids[start_P2[:, 1][pair] + offset]).nonzero()[:, 0]
    front_P = least_P.scatter_reduce(0, pair[differ], offset[differ], "amin")
    front_P = torch.where(front_P >= LEAST, front_P, torch.zeros_like(front_P))
    fronts = [0, *front_P.tolist()]
    if group is not None:
        fronts = [f if i and group[order[i]] == group[order[i - 1]] else 0 for i, f in enumerate(fronts)]
    return order, fronts
