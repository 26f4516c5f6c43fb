"""The auxiliary loss of a mixture of experts equals that of transformers."""

from __future__ import annotations

import pytest
import torch
from rlhf.errors import CapabilityError, TrainingError
from rlhf.interfaces import ModelSpec, Place
from rlhf.ops.packing import SequenceData, UnitData, pack
from rlhf.ops.reduce import weigh
from rlhf.types import Reduce, RoleSpec, Update
from rlhf_modeling.experts import load_balance
from rlhf_plugin_local.launcher import LocalLauncher
from rlhf_plugin_local.trainer import TorchTrainer, TorchTrainerConfig
from rlhf_runtime.models.roles import Role
from rlhf_testing.models import model_path
from transformers import AutoModelForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

SIZES = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
ROW = [20, 21, 22, 40, 7, 3, 90, 11, 12]
COEF = 0.7


def moe():
    return model_path("qwen3_moe", **SIZES)


def made(coef=COEF, **options):
    spec = ModelSpec(RoleSpec("policy", trained=True), str(moe()), "fp32", **options)
    return TorchTrainer(TorchTrainerConfig(device="cpu", aux_loss_coef=coef, lr=0.0), spec)


def batch_of(*rows):
    units = [UnitData([SequenceData(r, {"loss_mask": [i > 0 for i in range(len(r))]})]) for r in rows]
    batch = weigh(pack(units), {"nll": Reduce("token_mean")})
    return batch.with_column("unit", "weight/tokens", torch.tensor([len(r) / batch.tokens for r in rows]), over=None)


def test_the_auxiliary_loss_equals_that_of_transformers():
    draw = torch.Generator().manual_seed(0)
    logits = [torch.randn(13, 8, generator=draw) for _ in range(3)]
    layers = [(x, x.topk(2).indices) for x in logits]
    assert load_balance(layers) == pytest.approx(float(load_balancing_loss_func(tuple(logits), 8, 2)), rel=1e-6)
    even = torch.zeros(4, 4)
    assert float(load_balance([(even, torch.tensor([[0, 1], [2, 3], [0, 1], [2, 3]]))])) == pytest.approx(2.0)


def test_the_auxiliary_loss_is_fp32_when_routers_compute_in_bf16():
    """Two tokens with equal logits: E x (share of the chosen expert) x e^3 / (e^3 + 1), its probability."""
    logits = torch.tensor([[3.0, 0.0]] * 2, dtype=torch.bfloat16)
    loss = load_balance([(logits, torch.tensor([[0], [0]]))])
    assert loss.dtype == torch.float32
    assert float(loss) == pytest.approx(2 * 0.9525741268, rel=1e-6)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients_of_the_auxiliary_loss_equal_those_of_transformers(nll, checkpointing):
    trainer = made(gradient_checkpointing=checkpointing)
    sums = trainer.accumulate([batch_of(ROW)], nll, {}, {})
    model = AutoModelForCausalLM.from_pretrained(moe(), dtype=torch.float32)
    ids = torch.tensor([ROW])
    out = model(ids, labels=ids, output_router_logits=True)
    assert sums["aux_loss"] == (pytest.approx(float(out.aux_loss), rel=1e-5), 0.0)
    assert made().evaluate([batch_of(ROW)], nll, {}, {})["aux_loss"] == pytest.approx(sums["aux_loss"], rel=1e-5)
    logprobs = out.logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])
    (-logprobs.mean() + COEF * out.aux_loss).backward()
    gradients = trainer.gradients()
    for name, p in model.named_parameters():
        if p.grad is not None:
            torch.testing.assert_close(gradients[name], p.grad, rtol=1e-4, atol=1e-6, msg=name)
    router = "model.layers.0.mlp.gate.weight"
    plain = made(coef=0.0)
    assert "aux_loss" not in plain.accumulate([batch_of(ROW)], nll, {}, {})
    assert not torch.allclose(plain.gradients()[router], gradients[router], atol=1e-4)


def test_micro_batches_are_weighted_by_their_tokens(nll):
    rows = [ROW, [5, 6, 7], ROW[::-1]]
    batch = batch_of(*rows)
    parts = [float(made().accumulate([batch_of(r)], nll, {}, {})["aux_loss"][0]) for r in rows]
    sums = made().accumulate([batch.select([n]) for n in range(3)], nll, {}, {})
    assert sums["aux_loss"][0] == pytest.approx(sum(p * len(r) for p, r in zip(parts, rows, strict=True)) / 21)


def test_the_controller_sends_the_token_weights(nll):
    launcher = LocalLauncher()
    launcher.place({"policy": Place()})
    spec = ModelSpec(RoleSpec("policy", trained=True), str(moe()), "fp32")
    group = launcher.launch_trainer(TorchTrainer, TorchTrainerConfig(device="cpu", aux_loss_coef=COEF), spec)
    batch = batch_of(ROW, [5, 6, 7]).select_columns(["loss_mask", "weight/nll"])
    sums, _ = Role(spec, group, 100).update(batch, nll, Update("policy", "loss"))
    assert sums["aux_loss"][0] == pytest.approx(
        float(made().accumulate([batch_of(ROW, [5, 6, 7])], nll, {}, {})["aux_loss"][0]), rel=1e-5
    )
    with pytest.raises(TrainingError, match="needs the unit column 'weight/tokens'"):
        group.worker.accumulate([batch], nll, {}, {})


def test_a_model_without_experts_is_refused():
    spec = ModelSpec(RoleSpec("policy", trained=True), str(model_path()), "fp32")
    with pytest.raises(CapabilityError, match=r"aux_loss_coef = 0\.7: Qwen3ForCausalLM has no experts to balance"):
        TorchTrainer(TorchTrainerConfig(device="cpu", aux_loss_coef=COEF), spec)
