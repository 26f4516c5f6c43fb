"""A load of weights, samples and log-probs of an engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from rlhf.types import GenerationRequest, Sampling
from rlhf.weights.bucket import Bucket


def load(
    generator: Any, source: Any, version: int = 0, lost: Callable[[Bucket], Bucket] = lambda bucket: bucket
) -> list[Any]:
    """The proofs. ``lost``: what becomes of a bucket on its way."""
    generator.begin_load(version)
    for bucket in source.buckets("live", 2**14):
        generator.take(lost(bucket))
    return list(generator.end_load())


def difference(generator: Any, source: Any) -> float:
    """Largest difference of a token's log-prob, engine against trainer."""
    ids = [20, 21, 22, 40, 7, 3, 90]
    rows = source.logits(torch.tensor(ids))[:-1].log_softmax(-1)
    expected = rows.gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    return float((torch.tensor(generator.logprobs([ids])[0][0]) - expected).abs().max())


def sample(generator: Any) -> list[Sequence[int]]:
    requests = [GenerationRequest((20, 21, 22), n, Sampling(8, ignore_eos=True)) for n in range(4)]
    return [turn.ids for _, turn in sorted(generator.generate(requests), key=lambda pair: pair[0])]
