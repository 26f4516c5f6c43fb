"""Random numbers of one computation."""

from __future__ import annotations

import torch
from rlhf_modeling.determinism import seeded


def test_a_seed_of_the_cpu_changes_no_later_number_and_keeps_nothing_for_gpus():
    torch.manual_seed(3)
    state, calls = torch.get_rng_state(), torch.cuda._lazy_seed_tracker.get_calls()
    with seeded(7, torch.device("cpu")):
        numbers = torch.rand(3)
    assert torch.equal(numbers, torch.rand(3, generator=torch.Generator().manual_seed(7)))
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.cuda._lazy_seed_tracker.get_calls() == calls
