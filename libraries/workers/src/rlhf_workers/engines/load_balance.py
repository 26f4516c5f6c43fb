"""Assigns requests to engines. The result depends on the requests alone, so that a run is reproducible."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from rlhf.types import GenerationRequest


def assign_requests(requests: Sequence[GenerationRequest], engines: int) -> list[list[int]]:
    """Positions in ``requests`` for each engine, in ascending order.

    The load of a group of samples with one prompt is the prompt's length, once, plus ``max_new_tokens`` of each sample.
    Samples of one prompt stay together, so that one engine computes the prompt, unless they exceed an engine's fair
    share. The heaviest groups are assigned first, each to the engine with the least load.

    Args:
        engines: >= 1.
    """
    by_prompt: dict[bytes, list[int]] = {}
    for position, request in enumerate(requests):
        by_prompt.setdefault(request.context_key, []).append(position)
    groups = [(len(requests[members[0]].ids), members) for members in by_prompt.values()]
    load = [length + sum(requests[p].sampling.max_new_tokens for p in members) for length, members in groups]
    pieces = []
    for (length, members), weight in zip(groups, load, strict=True):
        parts = min(len(members), -(-weight * engines // sum(load)))
        for n in range(parts):
            piece = members[n * len(members) // parts : (n + 1) * len(members) // parts]
            pieces.append((-length - sum(requests[p].sampling.max_new_tokens for p in piece), piece))
    shares: list[list[int]] = [[] for _ in range(engines)]
    loads = [(0, engine) for engine in range(engines)]
    for weight, piece in sorted(pieces):
        lightest, engine = heapq.heappop(loads)
        shares[engine] += piece
        heapq.heappush(loads, (lightest - weight, engine))
    return [sorted(share) for share in shares]
