"""Which engine draws which samples: a function of the requests alone, so the same run is the same run."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from rlhf.types import GenerationRequest


def assign_requests(requests: Sequence[GenerationRequest], engines: int) -> list[list[int]]:
    """Positions in ``requests`` for each engine, in order.

    The load of a sample is the tokens it may take, of a prompt its own length, once. Samples of one prompt stay
    together, so that it is computed once, unless they are more than an engine's fair share. The heaviest go first, each
    to the engine with the least load.

    Args:
        engines: >= 1.
    """
    groups: dict[tuple[int, ...], list[int]] = {}
    for position, request in enumerate(requests):
        groups.setdefault(request.ids, []).append(position)
    load = [len(ids) + sum(requests[p].sampling.max_new_tokens for p in members) for ids, members in groups.items()]
    pieces = []
    for (ids, members), weight in zip(groups.items(), load, strict=True):
        parts = min(len(members), -(-weight * engines // sum(load)))
        for n in range(parts):
            piece = members[n * len(members) // parts : (n + 1) * len(members) // parts]
            pieces.append((-len(ids) - sum(requests[p].sampling.max_new_tokens for p in piece), piece))
    shares: list[list[int]] = [[] for _ in range(engines)]
    loads = [(0, engine) for engine in range(engines)]
    for weight, piece in sorted(pieces):
        taken, engine = heapq.heappop(loads)
        shares[engine] += piece
        heapq.heappush(loads, (taken - weight, engine))
    return [sorted(share) for share in shares]
