"""Prefixes that sequences share: samples of one prompt, answers of a pair, a common preamble.

Under causal attention, a model's outputs for a token depend on that token and the tokens before it. If sequences have
the same ids up to and including a token, that token therefore needs only one computation. Such tokens are found by
their ids alone. After sorting, the longest prefix that a sequence shares with any earlier sequence is the prefix that
it shares with its predecessor.

The driver plans micro-batches by these rules, and a trainer that shares prefixes
(:attr:`rlhf.interfaces.TrainerFacts.shares_prefixes`) lays out its rows by them. The tokens of an image are equal if
the image is (:func:`content_ids`).

Shape suffixes: N tokens of B sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from torch import Tensor

from rlhf.types import Image

MIN_TOKENS = 4
"""Shortest prefix, in tokens, that is shared. For a shorter one, fetching its keys costs as much as is saved."""
GAIN = 1 / 50
"""Nothing is shared if this would save less than this fraction of all tokens, for the same reason."""


def content_ids(ids_N: Tensor, lens: Sequence[int], images_B: Sequence[tuple[Image, ...]]) -> Tensor:
    """``ids_N`` with the tokens of each image replaced by a negative number, which is the same for equal images.

    Args:
        ids_N: int64, on the CPU.
        lens: tokens of each sequence.
        images_B: images of each sequence; empty: no images.
    """
    if not images_B:
        return ids_N
    made_N, numbers, start = ids_N.clone(), dict[bytes, int](), 0
    for length, images in zip(lens, images_B, strict=True):
        for image in images:
            first = start + image.start
            made_N[first : first + image.tokens] = numbers.setdefault(image.data, -1 - len(numbers))
        start += length
    return made_N


def worth_sharing(saved: int, tokens: int) -> bool:
    """Whether prefixes should be shared if ``saved`` of ``tokens`` then need no computation."""
    return saved >= max(1, GAIN * tokens)


def sorted_by_prefix(
    ids: Tensor,
    starts: Sequence[int],
    lens: Sequence[int],
    sequences: Sequence[int],
    group: Sequence[int] | None = None,
) -> tuple[list[int], list[int]]:
    """``sequences`` in an order in which sequences with a common prefix are neighbours, and the number of tokens that
    each shares with its predecessor (0 if fewer than :data:`MIN_TOKENS`, or if their ``group`` differs)."""
    array = ids.numpy()
    raw = {b: array[starts[b] : starts[b] + lens[b]].astype(np.int32).tobytes() for b in sequences}  # half of int64
    # The order of little-endian bytes is not that of the numbers. Any order of tokens will do, because in each of them
    # sequences with equal prefixes are neighbours.
    order = sorted(sequences, key=raw.__getitem__ if group is None else lambda b: (group[b], raw[b]))
    fronts = [0] * len(order)
    for i, (a, b) in enumerate(pairwise(order), 1):
        if group is None or group[a] == group[b]:
            front = _front(np.frombuffer(raw[a], np.int32), np.frombuffer(raw[b], np.int32))
            fronts[i] = front if front >= MIN_TOKENS else 0
    return order, fronts


def _front(ids_a: np.ndarray, ids_b: np.ndarray) -> int:
    """Number of tokens in the common prefix of two sequences."""
    length, begin, step = min(len(ids_a), len(ids_b)), 0, 256
    while begin < length:
        end = min(begin + step, length)
        differ = ids_a[begin:end] != ids_b[begin:end]
        first = int(differ.argmax())
        if differ[first]:
            return begin + first
        begin, step = end, 2 * step
    return length
