"""The suite of ranks, on a real Ray."""

import ray
import torch
from suite_ranks import *  # noqa: F403


def test_a_call_is_one_put(steady, monkeypatch):
    puts, put = [], ray.put
    monkeypatch.setattr(ray, "put", lambda value: puts.append(value) or put(value))
    steady.call("same", [(torch.ones(50_000),), (torch.ones(50_000),)])
    assert len(puts) == 1
    assert puts[0].nbytes < 1.01 * 2 * 200_000
    steady.call("same", [("small",), ("small",)])
    assert len(puts) == 1
