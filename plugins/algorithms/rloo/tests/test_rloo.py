"""RLOO: needs, conformance, and the paper's form of the KL."""

from __future__ import annotations

import pytest
import torch
from rlhf_algorithms.policy_gradient_config import KLConfig
from rlhf_plugin_rloo import RLOO
from rlhf_testing import fabricate
from rlhf_testing.algorithm import AlgorithmContract


class TestRLOO(AlgorithmContract):
    algorithm = RLOO
    configs = (
        RLOO.Config(),
        RLOO.Config(kl=KLConfig(coef=0.1, before_baseline=True)),
        RLOO.Config(kl=KLConfig(coef=0.1, target=0.1, where="loss"), epochs=2),
    )


def test_needs_two_samples():
    assert TestRLOO().build(RLOO.Config()).needs().group_min == 2


def test_kl_before_the_baseline_is_the_papers_form():
    """r_i - beta sum_t kl_it enters the leave-one-out mean, and every token of an answer gets the same credit."""
    algorithm = TestRLOO().build(RLOO.Config(kl=KLConfig(coef=0.5, before_baseline=True)))
    batch = algorithm.assemble(fabricate.groups(1))[0]
    for name in ("old_logprobs", "ref_logprobs"):
        batch = batch.with_column("tok", name, fabricate.values(name, batch.tokens, 0))
    credited, _ = algorithm.credit(batch)
    mask, unit = batch.tok["loss_mask"], batch.unit_N
    d = (batch.tok["old_logprobs"] - batch.tok["ref_logprobs"]).double()
    r = [batch.unit["reward"][u] - 0.5 * d[mask & (unit == u)].sum() for u in range(batch.units)]
    for u in range(batch.units):
        peers = [r[v] for v in range(batch.units) if v != u and batch.unit["group"][v] == batch.unit["group"][u]]
        expected = float(r[u] - sum(peers) / len(peers))
        advantages = credited.tok["advantages"][mask & (unit == u)]
        assert advantages.tolist() == pytest.approx([expected] * len(advantages), rel=1e-5)
    assert torch.isfinite(credited.tok["advantages"]).all()
