"""Samples whose advantage is 0 are not computed in an update, and the weights are those of an update with all of
them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from rlhf.errors import TrainingError
from rlhf.interfaces import Loss, ModelSpec
from rlhf.ops.packing import SequenceData, UnitData, pack
from rlhf.ops.reduce import weigh
from rlhf.types import RoleSpec, Update
from rlhf_algorithms.kl import WithKL
from rlhf_algorithms.policy_losses import CISPO, GSPO, SAPO, PolicyLoss, PPOLoss, ReinforceLoss
from rlhf_plugin_local.launcher import LocalGroup
from rlhf_plugin_local.trainer import TorchTrainer, TorchTrainerConfig
from rlhf_runtime.models.roles import Role, with_signal
from torch import Tensor

from tests.runs import PROMPTS, Finished, Workshop

REWARD = """
def score(prompt, completion, row):
    return float(len(completion) % 2) if "1" in prompt else 1.0
"""
STEPS = ((0.5, 0.0, -1.0, 0.0), (0.0, 0.0, 0.0, 0.0), (0.0, 0.0, 0.0, 1.0))
"""The advantage of each sample, in three optimizer steps."""


def batch(advantages: tuple[float, ...], loss: Loss) -> Any:
    draw = torch.Generator().manual_seed(0)
    units = []
    for length in (7, 5, 9, 6)[: len(advantages)]:
        ids = torch.randint(3, 90, (length,), generator=draw).tolist()
        units.append(UnitData([SequenceData(ids, {"loss_mask": [i >= 2 for i in range(length)]})]))
    data = pack(units)
    mask_N = data.tok["loss_mask"]
    data = data.with_column("tok", "advantages", torch.tensor(advantages)[data.unit_N] * mask_N)
    data = data.with_column("tok", "old_logprobs", torch.full((data.tokens,), -4.5))
    return weigh(loss.prepare(data), loss.reduce())


def trained(shop: Workshop, loss: Loss, micro_tokens: int) -> tuple[list[dict[str, Any]], dict[str, Tensor]]:
    """The sums of each step, and the weights after the last one. Momentum and weight decay apply in the second step,
    which has no gradient."""
    config = TorchTrainerConfig(lr=1e-2, device="cpu", weight_decay=0.1)
    trainer = TorchTrainer(config, ModelSpec(RoleSpec("policy", trained=True), str(shop.model), "fp32"))
    role = Role(trainer.spec, LocalGroup(trainer), micro_tokens)
    sums = [role.update(batch(step, loss), loss, Update("policy", "loss"))[0] for step in STEPS]
    return sums, {name: value.clone() for name, value in trainer.module.state_dict().items()}


@pytest.mark.parametrize(
    ("loss", "micro_tokens"),
    [(PPOLoss, 1), (PPOLoss, 1000), *((loss, 12) for loss in (ReinforceLoss, GSPO, CISPO, SAPO))],
)
def test_the_weights_are_those_of_an_update_with_all_samples(
    shop: Workshop, loss: type[PolicyLoss], micro_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    sums, weights = trained(shop, loss(), micro_tokens)
    assert [step["tokens_left_out"] for step in sums] == [(11, 27), (22, 27), (21, 27)]
    monkeypatch.setattr(PolicyLoss, "signal", lambda self: ())
    expected_sums, expected = trained(shop, loss(), 1000)
    for name, value in expected.items():
        torch.testing.assert_close(weights[name], value, rtol=0, atol=1e-5)
    for step, all_samples in zip(sums, expected_sums, strict=True):
        assert step["loss"][0] == pytest.approx(all_samples["loss"][0], rel=1e-5, abs=1e-9)


def test_all_samples_are_computed_for_an_entropy_and_for_a_kl_term_in_the_loss() -> None:
    assert PPOLoss().signal() == ("advantages",)
    assert WithKL(PPOLoss(), "k3").signal() == ()
    assert [PPOLoss(PPOLoss.Config(entropy_coef=coef)).signal() for coef in (0.0, 0.1)] == [(), ()]


def test_a_signal_that_is_no_column_of_the_loss_is_refused() -> None:
    """A string instead of a tuple names ten columns that do not exist, so no unit would have a signal."""

    class Text(PPOLoss):
        def signal(self) -> Any:
            return "advantages"

    loss = Text()
    with pytest.raises(TrainingError, match=r"signal\(\) of loss 'ppo' names \['a', .* write \(\"advantages\",\)"):
        with_signal(batch(STEPS[0], loss), loss)


def left_out(run: Finished) -> list[float]:
    return [line["policy/tokens_left_out"] for line in run.lines()]


def test_a_run_leaves_groups_of_equal_rewards_out(shop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    passes = {"epochs": 2, "minibatches": 2}
    changes: dict[str, Any] = {"reward": [{"use": f"file:{shop.file('odd.py', REWARD)}"}], "algorithm": passes}
    run = shop.train("grpo", "part", **changes)
    assert all(0 <= share < 1 for share in left_out(run))
    assert any(left_out(run))
    with monkeypatch.context() as patch:
        patch.setattr(PolicyLoss, "signal", lambda self: ())
        baseline = shop.train("grpo", "whole", **changes)
    assert "policy/tokens_left_out" not in baseline.lines()[0]
    for line, other in zip(run.lines(), baseline.lines(), strict=True):
        for name in ("policy/loss", "policy/grad_norm", "reward/mean", "length/mean"):
            assert line[name] == pytest.approx(other[name], rel=1e-4, abs=1e-6)


def test_samples_of_a_member_whose_loss_needs_all_are_computed(shop: Workshop) -> None:
    """All rewards are equal: only the samples of the other member are left out."""
    text = "def score(prompt, completion, row):\n    return 1.0\n"
    train = [{"path": str(shop.rows(f"{name}.jsonl", PROMPTS))} for name in ("math", "chat")]
    members = {
        "math": {"use": "grpo", "sources": ["math"]},
        "chat": {"use": "grpo", "sources": ["chat"], "loss": {"entropy_coef": 0.0}},
    }
    run = shop.train(
        "per_source",
        "members",
        data={"train": train, "batch_size": 6},
        algorithm={"members": members},
        reward=[{"use": f"file:{shop.file('equal.py', text)}"}],
    )
    assert all(0 < share < 1 for share in left_out(run))
    assert "policy/math/kl_old" not in run.lines()[0]
    assert "policy/chat/kl_old" in run.lines()[0]
