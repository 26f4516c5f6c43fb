"""The policy losses against those of polgrad, a package of reference losses by other authors: value and gradient on its
seeded random batches. Ours compute in fp32, polgrad in fp64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from rlhf.ops.loss_value import evaluate
from rlhf.ops.packing import SequenceData, UnitData, pack
from rlhf.ops.reduce import weigh
from rlhf_algorithms.policy_losses import CISPO, GSPO, PolicyLoss, PPOLoss, ReinforceLoss
from torch import Tensor

pytest.importorskip("polgrad")
from polgrad import ALGORITHMS, policy_loss
from polgrad.testing import assert_conforms, random_batches

LENGTH = 12
"""The constant of Dr. GRPO, above every answer of polgrad's batches."""
MEANS = {"aggregation": "seq_mean_token_mean"}
CLIPS = {"clip_low": 0.2, "clip_high": 0.2}
TWINS: dict[str, PolicyLoss] = {
    "ppo": PPOLoss(PPOLoss.Config(**CLIPS)),
    "grpo": PPOLoss(PPOLoss.Config(**CLIPS, **MEANS)),
    "dr_grpo": PPOLoss(PPOLoss.Config(**CLIPS, aggregation="seq_sum_constant", max_length=LENGTH)),
    "dapo": PPOLoss(PPOLoss.Config(clip_low=0.2, clip_high=0.28)),
    "gspo": GSPO(),
    "gspo_token": GSPO(),  # the same where an answer has one advantage
    "cispo": CISPO(CISPO.Config(clip_low=1.0, clip_high=0.2)),
    "rloo": ReinforceLoss(ReinforceLoss.Config(aggregation="seq_mean_token_sum")),
    "reinforce_pp": PPOLoss(PPOLoss.Config(**CLIPS, **MEANS)),
}
TIS = PPOLoss(PPOLoss.Config(**CLIPS, **MEANS, correction={"preset": "tis", "low": 0.0, "high": 10.0}))


def loss_function(loss: PolicyLoss) -> Callable[..., Tensor]:
    """The loss as a function of padded [B, T] tensors."""

    def value(*, logprobs: Tensor, response_mask: Tensor, advantages: Tensor, **others_BT: Tensor) -> Tensor:
        columns_BT = {**others_BT, "advantages": advantages[:, None].expand_as(logprobs)}
        units = []
        for b, mask in enumerate(response_mask):
            tok: dict[str, Any] = {name: [0.0, *column_BT[b][mask].tolist()] for name, column_BT in columns_BT.items()}
            tok["loss_mask"] = [False] + [True] * int(mask.sum())
            units.append(UnitData([SequenceData([1] * (int(mask.sum()) + 1), tok)]))
        batch = weigh(loss.prepare(pack(units)), loss.reduce())
        total, _ = evaluate(loss, batch, {"logprobs": logprobs[response_mask].float()}, {}, {})
        return total.double()

    return value


@pytest.mark.parametrize("name", TWINS)
def test_losses_conform_to_polgrad(name: str) -> None:
    reference = ALGORITHMS[name].loss
    if name == "dr_grpo":
        reference = replace(reference, norm_len=LENGTH)
    report = assert_conforms(loss_function(TWINS[name]), reference, loss_rtol=1e-4, grad_rtol=1e-5)
    assert report.n_cases == 64


def test_a_corrected_loss_conforms_to_polgrad() -> None:
    """``grpo_tis``; polgrad's own comparison has no log-probs of a generator."""
    config = replace(ALGORITHMS["grpo_tis"].loss, kl=None)
    for batch in random_batches(32, ((4, 8), (2, 12)), seed=1):
        gradients = []
        for peer in (True, False):
            x = {name: value for name, value in batch.items() if name != "ref_logprobs"}
            x["logprobs"] = x["logprobs"].clone().requires_grad_()
            if peer:
                loss = policy_loss(config, **x).loss
            else:
                loss = loss_function(TIS)(**{n.replace("rollout", "gen"): value for n, value in x.items()})
            loss.backward()
            gradients.append(torch.cat([loss.detach()[None], x["logprobs"].grad.flatten()]))
        assert gradients[1] == pytest.approx(gradients[0], rel=1e-4, abs=1e-6)


def test_another_loss_does_not_conform() -> None:
    with pytest.raises(AssertionError, match="conformance violation"):
        assert_conforms(loss_function(TWINS["ppo"]), ALGORITHMS["grpo"].loss, loss_rtol=1e-4, grad_rtol=1e-5)
