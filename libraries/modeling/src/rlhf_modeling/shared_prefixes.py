"""Compute a prefix that sequences of a row share only once.

Which sequences share one is decided in :mod:`rlhf.ops.prefixes`. Each sequence computes the tokens after its shared
prefix, and attends to the places of all of its tokens::

    a b c d e        5 tokens: places 0 1 2 3 4
    a b c x y        2 more:          0 1 2 5 6
    a b c x z w      2 more:          0 1 2 5 7 8

Shape suffixes: N tokens of B sequences, M <= N computed tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from rlhf.ops.experts import distinct_ids
from rlhf.ops.prefixes import content_ids, sorted_by_prefix, worth_sharing
from rlhf.ops.spans import owners
from rlhf.types import Image
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Stretch:
    """The tokens of one sequence that are computed for it: all tokens after the prefix that another sequence
    computes."""

    start: int
    """Index of its first computed token among the M."""
    skip: int
    """Number of tokens of the shared prefix; 0 if none is shared."""
    length: int
    """Tokens of the whole sequence; ``length - skip`` are computed."""
    first: int
    """Index of the sequence's first token among the N."""


@dataclass(frozen=True, slots=True)
class Shared:
    """The computed tokens of packed sequences; see the module's example."""

    ids_M: Tensor
    """int64."""
    position_M: Tensor
    """int64: position of each computed token in its sequence."""
    place_N: Tensor
    """int64: index of the computed token for each original token."""
    source_M: Tensor
    """int64: index of an original token for each computed token."""
    stretches: tuple[Stretch, ...]
    """In the order of the M tokens. A sequence whose tokens are all computed by others has no stretch."""


def share_prefixes(
    ids_N: Tensor,
    lens: Sequence[int],
    images_B: Sequence[tuple[Image, ...]] = (),
    experts_NLK: Tensor | None = None,
) -> Shared | None:
    """Which tokens to compute; None if no two sequences share a long enough prefix.

    Args:
        ids_N: int64, on any device; the result is on the same device. On a GPU it waits for the values.
        lens: tokens of each sequence; they sum to N.
        images_B: images of each sequence; empty: no images.
        experts_NLK: experts of each token, for models without images. Tokens with different experts are not shared.
    """
    plain = ids_N.cpu()
    ids = content_ids(plain, lens, images_B) if experts_NLK is None else distinct_ids(plain, experts_NLK.cpu())
    starts = [0, *accumulate(lens)][:-1]
    order, fronts = sorted_by_prefix(ids, starts, lens, range(len(lens)))
    if not worth_sharing(sum(fronts), len(ids)):
        return None
    place_N, every_N = torch.empty_like(ids), torch.arange(len(ids))
    places, every = place_N.numpy(), every_N.numpy()
    stretches: list[Stretch] = []
    end, previous_start = 0, 0
    for b, front in zip(order, fronts, strict=True):
        start, length = starts[b], lens[b] - front
        # Sorted, so the sequence before this one has the same prefix (:mod:`rlhf.ops.prefixes`).
        places[start : start + front] = places[previous_start : previous_start + front]
        places[start + front : start + lens[b]] = every[end : end + length]
        if length:
            stretches.append(Stretch(end, front, lens[b], start))
        end, previous_start = end + length, start
    source_M = torch.empty(end, dtype=torch.int64)
    source_M[place_N] = every_N  # any token of those that share a place, because their ids and positions are equal
    position_N = every_N - torch.tensor(starts)[owners(torch.tensor(lens))]
    device = ids_N.device
    tensors = (plain[source_M], position_N[source_M], place_N, source_M)
    ids_M, position_M, place_N, source_M = (x.to(device) for x in tensors)
    return Shared(ids_M, position_M, place_N, source_M, tuple(stretches))


def take_rows(x: Tensor, index: Tensor) -> Tensor:
    """``x[index]`` along the first dimension. The gradient of a row that is read several times is the sum.

    On a CPU ``index_select`` takes half the time, forward and backward; on a GPU only indexing adds in a fixed order.
    """
    return x.index_select(0, index) if x.device.type == "cpu" else x[index]
