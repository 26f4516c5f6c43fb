"""Which rank computes which units, in which micro-batches."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

Plan = list[list[list[int]]]
"""[rank][micro-batch][unit]."""


def plan(tokens_per_unit: Sequence[int], ranks: int, budget: int) -> Plan:
    """Spread units over ranks and micro-batches of at most ``budget`` tokens.

    Every rank gets the same number of micro-batches and none of them is empty: sharded trainers gather weights in
    every forward, so uneven counts hang them. Longest units first, each to the emptiest micro-batch. A unit longer
    than the budget is alone in its micro-batch. Where there are fewer units than micro-batches to fill, the missing
    places repeat the shortest unit; :func:`fillers` tells which, and their weights must be zero.

    Args:
        tokens_per_unit: tokens of each unit, > 0.
        ranks: >= 1.
        budget: tokens, > 0.
    """
    units = sorted(range(len(tokens_per_unit)), key=lambda u: (-tokens_per_unit[u], u))
    if not units:
        raise ValueError("nothing to dispatch: the batch has no units")
    micros = min(-(-sum(tokens_per_unit) // (budget * ranks)), -(-len(units) // ranks))
    while True:
        bins = _spread(units, tokens_per_unit, micros * ranks)
        if all(len(b) <= 1 or sum(tokens_per_unit[u] for u in b) <= budget for b in bins):
            break
        micros += 1
    bins = [sorted(b) for b in bins]
    shortest = units[-1]
    filled = [b or [shortest] for b in bins]
    return [filled[rank::ranks] for rank in range(ranks)]


def fillers(the_plan: Plan) -> Plan:
    """The same shape, holding only places that repeat a unit already placed (their weights must be zero)."""
    seen: set[int] = set()
    width = max(len(rank) for rank in the_plan)
    result: Plan = [[[] for _ in rank] for rank in the_plan]
    for m in range(width):  # micro-batch by micro-batch over ranks: real places come first in this order
        for r, rank in enumerate(the_plan):
            for unit in rank[m]:
                if unit in seen:
                    result[r][m].append(unit)
                seen.add(unit)
    return result


def _spread(units: Sequence[int], tokens: Sequence[int], n: int) -> list[list[int]]:
    """Longest first, each to the emptiest of ``n`` bins (ties: the first)."""
    heap = [(0, i) for i in range(n)]
    bins: list[list[int]] = [[] for _ in range(n)]
    for u in units:
        load, i = heapq.heappop(heap)
        bins[i].append(u)
        heapq.heappush(heap, (load + tokens[u], i))
    return bins
