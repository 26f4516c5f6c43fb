"""Compute a prefix that sequences share only once: samples of one prompt, answers of a pair, a common preamble.

Under causal attention, a model's outputs for a token depend on that token and the tokens before it. Tokens of
different sequences with the same ids up to and including themselves therefore need one computation. They are found by
their ids alone. After sorting, the longest prefix that a sequence shares with any earlier sequence is the prefix that
it shares with its predecessor. So each sequence computes the tokens after its shared prefix, and attends to the places
of all of its tokens::

    a b c d e        5 tokens: places 0 1 2 3 4
    a b c x y        2 more:          0 1 2 5 6
    a b c x z w      2 more:          0 1 2 5 7 8

The tokens of an image are equal where the image is (:func:`content_ids`).

Shape suffixes: N tokens of B sequences, M <= N computed tokens, U units.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
import torch
from torch import Tensor

from rlhf.ops.batch import Batch
from rlhf.ops.spans import owners
from rlhf.types import Image

LEAST = 4
"""Shortest prefix, in tokens, that is shared. For a shorter one, fetching its keys costs as much as is saved."""
GAIN = 1 / 50
"""Nothing is shared if less than this part of all tokens would be saved, for the same reason."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """The tokens of one sequence that are computed for it: all tokens after the prefix that another one computes."""

    start: int
    """Index of its first computed token among the M."""
    skip: int
    """Tokens of the shared prefix; 0 if it shares nothing."""
    length: int
    """Tokens of the whole sequence; ``length - skip`` are computed."""
    at: int
    """Index of the sequence's first token among the N."""


@dataclass(frozen=True, slots=True)
class Shared:
    """The computed tokens of packed sequences; see the module's example."""

    ids_M: Tensor
    """int64."""
    position_M: Tensor
    """int64: position of each computed token in its sequence."""
    place_N: Tensor
    """int64: where each original token is computed."""
    source_M: Tensor
    """int64: an original token of each computed token."""
    stretches: tuple[Stretch, ...]
    """In the order of the M tokens. A sequence whose tokens are all computed by others has no stretch."""


@dataclass(frozen=True, slots=True)
class UnitPrefixes:
    """Number of computed tokens of units, alone and next to each other."""

    tokens: list[int]
    """[U]: computed tokens of each unit alone."""
    order: list[int]
    """The units, ordered so that units that share a prefix are neighbours."""
    shared: list[int]
    """[U]: tokens that unit ``order[i]`` need not compute if ``order[i - 1]`` is in the same micro-batch. All are zero
    if the total is too small to matter."""


def content_ids(ids_N: Tensor, lens: Sequence[int], images_B: Sequence[tuple[Image, ...]]) -> Tensor:
    """``ids_N`` with a negative number in place of the tokens of each image, the same one for equal images.

    Args:
        ids_N: int64, on the CPU.
        lens: tokens of each sequence.
        images_B: images of each sequence; empty: there are none.
    """
    if not images_B:
        return ids_N
    made_N, numbers, start = ids_N.clone(), dict[bytes, int](), 0
    for length, images in zip(lens, images_B, strict=True):
        for image in images:
            first = start + image.at
            made_N[first : first + image.tokens] = numbers.setdefault(image.data, -1 - len(numbers))
        start += length
    return made_N


def share_prefixes(ids_N: Tensor, lens: Sequence[int], images_B: Sequence[tuple[Image, ...]] = ()) -> Shared | None:
    """Which tokens to compute; None if no two sequences share a long enough prefix.

    Args:
        ids_N: int64, on any device; the result is on the same device.
        lens: tokens of each sequence; they sum to N.
        images_B: images of each sequence; empty: there are none.
    """
    plain = ids_N.cpu()
    ids = content_ids(plain, lens, images_B)
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
    source_M[place_N] = every_N  # any token of those that share a place, because their ids and positions are equal
    position_N = every_N - torch.tensor(starts)[owners(torch.tensor(lens))]
    device = ids_N.device
    found = (plain[source_M], position_N[source_M], place_N, source_M)
    ids_M, position_M, place_N, source_M = (x.to(device) for x in found)
    return Shared(ids_M, position_M, place_N, source_M, tuple(stretches))


def unit_prefixes(batch: Batch) -> UnitPrefixes:
    """The computed tokens of every unit, and an order in which units share prefixes. ``batch`` is on the CPU."""
    lens, starts = batch.lens_B.tolist(), batch.starts_B.tolist()
    ids_N = content_ids(batch.ids_N, lens, batch.images_B)
    units = batch.unit_B.tolist()
    tokens = batch.tokens_per_unit()
    first: dict[int, int] = {}
    for b, unit in enumerate(units):
        first.setdefault(unit, b)
    if len(first) < len(lens):
        order, fronts = _sorted(ids_N, starts, lens, range(len(lens)), units)
        for b, front in zip(order, fronts, strict=True):
            tokens[units[b]] -= front
    order, fronts = _sorted(ids_N, starts, lens, list(first.values()))
    if batch.tokens - sum(tokens) + sum(fronts) < GAIN * batch.tokens:
        return UnitPrefixes(batch.tokens_per_unit(), list(range(batch.units)), [0] * batch.units)
    return UnitPrefixes(tokens, [units[b] for b in order], fronts)


def take_rows(x: Tensor, index: Tensor) -> Tensor:
    """``x[index]`` along the first dimension. The gradient of a row that is taken several times is the sum.

    On a CPU ``index_select`` takes half the time, forward and backward; on a GPU only indexing adds in a fixed order.
    """
    return x.index_select(0, index) if x.device.type == "cpu" else x[index]


def _sorted(
    ids: Tensor, starts: Sequence[int], lens: Sequence[int], which: Sequence[int], group: Sequence[int] | None = None
) -> tuple[list[int], list[int]]:
    """The sequences ``which`` in an order in which those with a common prefix are neighbours, and the number of tokens
    that each shares with the one before it (0 if fewer than :data:`LEAST`, or if their ``group`` differs)."""
    array = ids.numpy().astype(np.int32)  # half the bytes of int64, in the same order
    raw = {b: array[starts[b] : starts[b] + lens[b]].tobytes() for b in which}
    order = sorted(which, key=raw.__getitem__ if group is None else lambda b: (group[b], raw[b]))
    fronts = [0] * len(order)
    for i, (a, b) in enumerate(pairwise(order), 1):
        if group is None or group[a] == group[b]:
            front = _front(array[starts[a] : starts[a] + lens[a]], array[starts[b] : starts[b] + lens[b]])
            fronts[i] = front if front >= LEAST else 0
    return order, fronts


def _front(one: np.ndarray, two: np.ndarray) -> int:
    """How many tokens two sequences have in common at their fronts."""
    least, begin, step = min(len(one), len(two)), 0, 256
    while begin < least:
        end = min(begin + step, least)
        differ = one[begin:end] != two[begin:end]
        first = int(differ.argmax())
        if differ[first]:
            return begin + first
        begin, step = end, 2 * step
    return least
