"""Sorted losses: their partners, and that loss and gradient are those of sorting the whole optimizer batch."""

from __future__ import annotations

import pytest
import torch
from rlhf.ops.batch import Batch
from rlhf.ops.loss_value import add_sums, evaluate, required_columns
from rlhf.ops.packing import SequenceData, UnitData, pack
from rlhf.ops.reduce import weigh
from rlhf_plugin_dpo import DPOLoss, ranks

POLICY = [(-1.0, -5.0), (-2.0, -3.0), (-4.0, -1.0), (-0.5, -2.5)]
REFERENCE = [(-2.0, -2.0), (-1.0, -4.5), (-3.5, -3.0), (-1.5, -1.0)]
"""One token an answer: the log-probs of (chosen, rejected) of four pairs."""


def column(pairs) -> torch.Tensor:
    return torch.tensor([[[0.0, c], [0.0, r]] for c, r in pairs]).flatten()


def batch(count: int = 4, extra: int = 0) -> Batch:
    """``count`` pairs and ``extra`` ones without a trained token."""
    units = [
        UnitData([SequenceData([1, 2], {"loss_mask": [False, u < count]}, role) for role in (0, 1)])
        for u in range(count + extra)
    ]
    pairs = pack(units).with_column("tok", ranks.LIVE_LOGPROBS, column((POLICY * 2)[: count + extra]), over=None)
    return pairs.with_column("tok", "ref_logprobs", column((REFERENCE * 2)[: count + extra]), over=None)


def test_partners_have_the_same_rank():
    values = torch.tensor([3.0, 1.0, 2.0])
    other = torch.tensor([10.0, 30.0, 20.0])
    assert ranks.partners(values, other, torch.tensor([True, True, True])).tolist() == [30.0, 10.0, 20.0]
    assert ranks.partners(values, other, torch.tensor([True, False, True])).tolist() == [20.0, 0.0, 10.0]


def test_columns_by_hand():
    # log-ratios of the policy 4, 1, -3, 2 have ranks 3, 1, 0, 2; those of the reference sort as -0.5, -0.5, 0, 3.5
    prepared = DPOLoss(DPOLoss.Config(loss_type=("aot", "aot_unpaired"))).prepare(batch())
    assert prepared.unit[ranks.REFERENCE_PARTNER].tolist() == [3.5, -0.5, -0.5, 0.0]
    # chosen log-ratios 1, -1, -0.5, 1 (ranks 2, 0, 1, 3); rejected -3, 1.5, 2, -1.5 (ranks 0, 2, 3, 1)
    assert prepared.unit[ranks.REJECTED_PARTNER].tolist() == [1.5, -3.0, -1.5, 2.0]
    assert prepared.unit[ranks.CHOSEN_PARTNER].tolist() == [-1.0, 1.0, 1.0, -0.5]


def test_pairs_without_tokens_have_no_rank():
    plain = DPOLoss(DPOLoss.Config(loss_type=("aot", "aot_unpaired"))).prepare(batch(3))
    longer = DPOLoss(DPOLoss.Config(loss_type=("aot", "aot_unpaired"))).prepare(batch(3, extra=2))
    for name in (ranks.REFERENCE_PARTNER, ranks.REJECTED_PARTNER, ranks.CHOSEN_PARTNER):
        assert longer.unit[name].tolist() == [*plain.unit[name].tolist(), 0.0, 0.0]


def whole_batch_sort(name: str, logp: torch.Tensor, ref: torch.Tensor, beta: float) -> torch.Tensor:
    """The loss as one would write it with all pairs at hand: sort both sides, compare rank by rank."""
    if name == "aot":
        delta = (logp[:, 0] - logp[:, 1]).sort().values - (ref[:, 0] - ref[:, 1]).sort().values
    else:
        delta = (logp - ref)[:, 0].sort().values - (logp - ref)[:, 1].sort().values
    return (1 + (-beta * delta).exp()).log().mean()


@pytest.mark.parametrize("name", ["aot", "aot_unpaired"])
@pytest.mark.parametrize("parts", [[[0, 1, 2, 3]], [[0], [1], [2], [3]], [[3, 1], [0, 2]]], ids=["one", "four", "two"])
def test_micro_batches_give_the_loss_and_gradient_of_the_sorted_whole(name, parts):
    loss = DPOLoss(DPOLoss.Config(loss_type=name, beta=0.7))
    logp = torch.tensor(POLICY, requires_grad=True)
    prepared = weigh(loss.prepare(batch()), loss.reduce())
    sums = []
    for units in parts:
        micro = prepared.select(units).select_columns(required_columns(loss, []))
        value, metrics = evaluate(loss, micro, {"logprobs": logp[units].flatten()}, {}, {})
        value.backward()
        sums.append(metrics)
    stated_logp = torch.tensor(POLICY, requires_grad=True)
    expected = whole_batch_sort(name, stated_logp, torch.tensor(REFERENCE), 0.7)
    expected.backward()
    assert add_sums(sums)["loss"][0] == pytest.approx(float(expected), rel=1e-6)
    assert torch.allclose(logp.grad, stated_logp.grad, rtol=1e-5, atol=1e-7)
    assert bool((logp.grad != 0).all()), "both sides of every pair learn"
