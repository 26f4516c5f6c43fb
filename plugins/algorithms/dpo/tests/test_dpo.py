"""The algorithms' schedule and state, the terms beside the loss types, metrics, and OpenRLHF's numbers."""

from __future__ import annotations

import math

import pytest
import torch
from rlhf.ops.loss_value import evaluate, finish_sums
from rlhf.ops.reduce import weigh
from rlhf.types import Snapshot, Update
from rlhf_plugin_dpo import DPO, DPOLoss

from tests.support.pairs import pair


def algorithm(config=None, **options):
    return DPO(config or DPO.Config(), {"loss": DPOLoss(DPOLoss.Config(**options))})


# Two pairs: answers of 2 and 1 tokens, and of 1 and 3.
PAIRS = [pair(2, 1), pair(1, 3, 1)]
LOGP = torch.tensor([-1.0, -2.0, -4.0, -3.0, -1.0, -0.5, -1.5])
REFERENCE = torch.tensor([-2.0, -2.0, -3.0, -2.0, -1.0, -1.5, -2.5])
"""The log-ratios of the answers, sums over tokens, are 1 and -1 for those chosen, -1 and 2 for those rejected. The
margins are 2 and -3, of the means 0.5 + 1 = 1.5 and -1 - 2/3 = -5/3."""


def measured(coef=None, **options):
    """(loss, metrics) of the two pairs."""
    loss = DPOLoss(DPOLoss.Config(**options))
    batch = algorithm(**options).assemble(PAIRS)[0]
    column = torch.zeros(batch.tokens).masked_scatter(batch.tok["loss_mask"], REFERENCE)
    batch = weigh(batch.with_column("tok", "ref_logprobs", column), loss.reduce())
    total, sums = evaluate(loss, batch, {"logprobs": LOGP}, coef or {}, {})
    return float(total), finish_sums(sums)


def softplus(x):
    return math.log1p(math.exp(x))


def test_the_loss_of_two_pairs_by_hand():
    assert measured(beta=0.5)[0] == pytest.approx((softplus(-1.0) + softplus(1.5)) / 2)


def test_ipo_of_means_and_of_sums():
    """Means over an answer's tokens as in the paper and TRL; sums are what OpenRLHF computes."""
    assert measured(loss_type="ipo", beta=0.5)[0] == pytest.approx(((1.5 - 1) ** 2 + (-5 / 3 - 1) ** 2) / 2)
    assert measured(loss_type="ipo", beta=0.5, ipo="sum")[0] == pytest.approx(((2 - 1) ** 2 + (-3 - 1) ** 2) / 2)


def test_openrlhfs_nll_is_by_answer_and_trls_sft_by_token():
    """Chosen answers of 2 and 1 tokens with NLL 1 + 2 and 3."""
    plain = measured()[0]
    assert measured(nll_coef=0.5)[0] - plain == pytest.approx(0.5 * (1.5 + 3) / 2)
    with_sft = measured(loss_type=("sigmoid", "sft"), loss_weights=(1.0, 0.5))[0]
    assert with_sft - plain == pytest.approx(0.5 * (1 + 2 + 3) / 3)


def test_weights_of_several_types():
    single_losses = {name: measured(loss_type=name)[0] for name in ("hinge", "nca_pair")}
    total, metrics = measured(loss_type=("hinge", "nca_pair"), loss_weights=(0.25, 2.0))
    assert total == pytest.approx(0.25 * single_losses["hinge"] + 2 * single_losses["nca_pair"])
    assert metrics["loss/hinge"] == pytest.approx(0.25 * single_losses["hinge"])


def test_reference_free_is_a_reference_of_zeros():
    chosen, rejected = [-3.0, -3.0], [-4.0, -3.0]
    expected = [softplus(-0.1 * (c - r)) for c, r in zip(chosen, rejected, strict=True)]
    assert measured(reference_free=True)[0] == pytest.approx(sum(expected) / 2)


def test_metrics_by_hand():
    metrics = measured(beta=0.5)[1]
    expected = {
        "chosen_reward": 0.0,
        "rejected_reward": 0.25,
        "reward_margin": -0.25,
        "accuracy": 0.5,
        "chosen_logprobs": -3.0,
        "rejected_logprobs": -3.5,
        "nll": (1.5 + 3.0) / 2,
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected)
    assert set(metrics) == {*expected, "loss", "loss/sigmoid"}


def test_the_reference_is_replaced_after_the_update():
    """The reference's log-probs are annotated before a step's updates: a snapshot in front would come too late."""
    dpo = algorithm(DPO.Config(snapshot_every=2))
    kinds = [[type(u) for u in dpo.updates(step)] for step in range(4)]
    assert kinds == [[Update], [Update, Snapshot], [Update], [Update, Snapshot]]
    assert dpo.updates(1)[1] == Snapshot("reference", "policy")
    soft = algorithm(DPO.Config(snapshot_every=2, snapshot_share=0.6))
    assert soft.updates(1)[1] == Snapshot("reference", "policy", 0.6)
    assert [type(u) for u in algorithm().updates(1)] == [Update]


def step(dpo, chosen, rejected, pairs=PAIRS):
    batch, _ = dpo.assemble(pairs)
    return dpo.finish(0, batch, {"policy/chosen_reward": chosen, "policy/rejected_reward": rejected})


def test_the_running_shift_is_the_mean_of_all_earlier_rewards():
    dpo = algorithm(loss_type="bco_pair", bco_shift="running")
    assert dpo.updates(0)[0].coef == {"bco_shift": 0.0}
    assert step(dpo, 1.0, 0.0) == {"bco_shift": 0.0}, "what the step was trained with"
    assert dpo.updates(1)[0].coef == {"bco_shift": 0.5}
    step(dpo, 3.0, 1.0, PAIRS[:1])
    assert dpo.updates(2)[0].coef == {"bco_shift": pytest.approx((4 * 0.5 + 2 * 2.0) / 6)}

    other = algorithm(loss_type="bco_pair", bco_shift="running")
    other.load_state_dict(dpo.state_dict())
    assert other.updates(2) == dpo.updates(2)
    assert step(other, 1.0, 1.0) == step(dpo, 1.0, 1.0)
    assert other.state_dict() == dpo.state_dict()


def test_evaluation_and_skipped_updates_leave_the_shift_alone():
    dpo = algorithm(loss_type="bco_pair", bco_shift="running")
    step(dpo, 1.0, 0.0)
    state = dpo.state_dict()
    batch, _ = dpo.assemble(PAIRS)  # with credit and updates all that an evaluation does with the algorithm
    dpo.updates(0, dpo.credit(batch)[0])
    dpo.evaluated({"eval/chosen_reward": 9.0, "eval/rejected_reward": 9.0})
    dpo.finish(1, batch, {"policy/skipped": 1.0})
    assert dpo.state_dict() == state


def test_the_shift_enters_the_loss():
    expected = softplus(-(0.1 * 1 - 0.3)) + softplus(0.1 * -1 - 0.3), softplus(0.1 + 0.3) + softplus(0.1 * 2 - 0.3)
    options = {"loss_type": "bco_pair", "bco_shift": "running"}
    assert measured({"bco_shift": 0.3}, **options)[0] == pytest.approx(sum(expected) / 2)


def test_no_state_without_a_running_shift():
    assert algorithm().state_dict() == {}
    with pytest.raises(ValueError, match="keeps no state"):
        algorithm().load_state_dict({"shift": 1.0})
