"""Requests of the generator's tests, and the samples for them."""

from __future__ import annotations

import torch
from rlhf.types import GenerationRequest, Sampling
from rlhf_plugin_local.generator import TransformersGenerator

EOS = 1
Config = TransformersGenerator.Config


def requests(prompts=5, samples=4, seed=0, **options):
    g = torch.Generator().manual_seed(seed)
    out = []
    for p in range(prompts):
        ids = tuple(torch.randint(3, 90, (2 + 5 * p,), generator=g).tolist())
        out += [
            GenerationRequest(ids, 100 * p + s, Sampling(**{"max_new_tokens": 24, **options})) for s in range(samples)
        ]
    return out


def sample(generator, batch):
    turns = dict(generator.generate(batch))
    assert sorted(turns) == list(range(len(batch)))
    return [turns[i] for i in range(len(batch))]
