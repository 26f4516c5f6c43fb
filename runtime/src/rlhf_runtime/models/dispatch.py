"""Distribute units over ranks and micro-batches.

Units that share a prefix (:mod:`rlhf.ops.prefixes`) should be in the same micro-batch, where the prefix is computed
once. So they are distributed in bundles. A bundle is never longer than a micro-batch. It is divided further if ranks
would otherwise wait for one another.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from rlhf.ops.batch import Batch
from rlhf.ops.prefixes import content_ids, sorted_by_prefix, worth_sharing

Plan = list[list[list[int]]]
"""[share][micro-batch][unit]. A share is computed by one rank, or by the ranks that divide a model's layers."""

HALVINGS = 4
"""Number of times that the longest bundle is halved in the search for the shortest plan. The search starts at a rank's
even share of all tokens."""
OVERHEAD = 32
"""The cost of an additional micro-batch in the search is the token budget divided by this number."""


@dataclass(frozen=True, slots=True)
class _Item:
    """Units that stay together, and the number of tokens that they compute together."""

    units: tuple[int, ...]
    tokens: int


_Bin = list[_Item]


def plan(
    tokens_per_unit: Sequence[int],
    ranks: int,
    budget: int,
    order: Sequence[int] = (),
    shared: Sequence[int] = (),
) -> Plan:
    """Distribute units over ranks and micro-batches of at most ``budget`` computed tokens.

    Every rank gets the same number of micro-batches, none of them empty: sharded trainers gather weights in every
    forward pass and would hang with uneven numbers. The longest bundles are placed first, each into the emptiest
    micro-batch. A unit longer than the budget has a micro-batch to itself. If there are fewer units than micro-batches,
    the remaining places repeat the shortest unit. :func:`fillers` returns these places; their weights must be zero.

    Args:
        tokens_per_unit: tokens that each unit computes alone, > 0.
        ranks: >= 1.
        budget: tokens, > 0.
        order: all units, ordered so that units that share a prefix are neighbours; empty if none do.
        shared: [U], tokens that unit ``order[i]`` does not compute if ``order[i - 1]`` is in its micro-batch.
    """
    if not tokens_per_unit:
        raise ValueError("nothing to dispatch: the batch has no units")
    shortest = min(range(len(tokens_per_unit)), key=lambda u: (tokens_per_unit[u], -u))
    filler = _Item((shortest,), tokens_per_unit[shortest])
    if not any(shared):
        order, shared = range(len(tokens_per_unit)), [0] * len(tokens_per_unit)
    best, lowest_cost = [], None
    for cap in _caps(sum(tokens_per_unit) - sum(shared), ranks, budget) if any(shared) else [0]:
        bins = [b or [filler] for b in _spread(_bundles(tokens_per_unit, order, shared, cap), ranks, budget)]
        cost = _cost(bins, ranks, budget)
        if lowest_cost is None or cost < lowest_cost:
            best, lowest_cost = bins, cost
    micros = [sorted(u for item in b for u in item.units) for b in best]
    return [micros[rank::ranks] for rank in range(ranks)]


def fillers(shares: Plan) -> Plan:
    """A plan of the same shape with only the places that repeat a unit (their weights must be zero)."""
    units: set[int] = set()
    width = max(len(rank) for rank in shares)
    result: Plan = [[[] for _ in rank] for rank in shares]
    for m in range(width):  # micro-batch by micro-batch over ranks: real places come first in this order
        for r, rank in enumerate(shares):
            for unit in rank[m]:
                if unit in units:
                    result[r][m].append(unit)
                units.add(unit)
    return result


def micro_batches(batch: Batch, shares: Plan) -> list[list[Batch]]:
    """The micro-batches of each rank. They share the memory of one copy of the batch, because allocating a few large
    arrays is faster than many small ones."""
    copy = batch.select([unit for rank in shares for units in rank for unit in units])
    ends = accumulate(len(units) for rank in shares for units in rank)
    return [[copy.between((end := next(ends)) - len(units), end) for units in rank] for rank in shares]


def _caps(tokens: int, ranks: int, budget: int) -> list[int]:
    """Lengths of the longest bundle to try: a micro-batch, a rank's even share of all work and parts of it, one
    unit."""
    even = -(-tokens // ranks)
    return [budget, *(cap for i in range(HALVINGS) if 0 < (cap := even >> i) < budget), 0]


def _bundles(tokens: Sequence[int], order: Sequence[int], shared: Sequence[int], cap: int) -> list[_Item]:
    """Join neighbours as long as a bundle computes at most ``cap`` tokens. Neighbours that share most tokens are joined
    first."""
    count = len(order)
    first, last = list(range(count)), list(range(count))  # of the bundle that ends, begins at a position
    cost = [tokens[u] for u in order]  # of the bundle that begins at a position
    for i in sorted((i for i in range(1, count) if shared[i]), key=lambda i: (-shared[i], i)):
        begin, end = first[i - 1], last[i]
        joined = cost[begin] + cost[i] - shared[i]
        if joined <= cap:
            # `last` and `first` are kept up to date only at the two ends of a bundle. No other position is read.
            cost[begin], last[begin], first[end] = joined, end, begin
    items, i = [], 0
    while i < count:
        items.append(_Item(tuple(order[i : last[i] + 1]), cost[i]))
        i = last[i] + 1
    return items


def _spread(items: Sequence[_Item], ranks: int, budget: int) -> list[_Bin]:
    """Place the longest items first, each into the emptiest bin (the first of equal bins). The number of bins is the
    smallest multiple of ``ranks`` that holds all items."""
    items = sorted(items, key=lambda item: (-item.tokens, min(item.units)))
    micros = min(-(-sum(item.tokens for item in items) // (budget * ranks)), -(-len(items) // ranks))
    while True:
        heap = [(0, i) for i in range(micros * ranks)]
        bins: list[_Bin] = [[] for _ in heap]
        for item in items:
            load, i = heapq.heappop(heap)
            bins[i].append(item)
            heapq.heappush(heap, (load + item.tokens, i))
        if all(len(b) <= 1 or _tokens(b) <= budget for b in bins):
            return bins
        micros += 1


def _cost(bins: Sequence[_Bin], ranks: int, budget: int) -> float:
    """Cost in tokens. In every micro-batch the ranks wait for the longest one."""
    longest = [max(map(_tokens, bins[m : m + ranks])) for m in range(0, len(bins), ranks)]
    return sum(longest) + len(longest) * budget / OVERHEAD


def _tokens(items: _Bin) -> int:
    return sum(item.tokens for item in items)


@dataclass(frozen=True, slots=True)
class UnitPrefixes:
    """Number of computed tokens of units, alone and as neighbours."""

    tokens: list[int]
    """[U]: computed tokens of each unit alone."""
    order: list[int]
    """The units, ordered so that units that share a prefix are neighbours."""
    shared: list[int]
    """[U]: tokens that unit ``order[i]`` need not compute if ``order[i - 1]`` is in the same micro-batch. All are zero
    if the total is too small to matter."""


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
        order, fronts = sorted_by_prefix(ids_N, starts, lens, range(len(lens)), units)
        for b, front in zip(order, fronts, strict=True):
            tokens[units[b]] -= front
    order, fronts = sorted_by_prefix(ids_N, starts, lens, list(first.values()))
    if not worth_sharing(batch.tokens - sum(tokens) + sum(fronts), batch.tokens):
        return UnitPrefixes(batch.tokens_per_unit(), list(range(batch.units)), [0] * batch.units)
    return UnitPrefixes(tokens, [units[b] for b in order], fronts)
