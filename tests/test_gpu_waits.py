"""Where the host waits for the GPU in a micro-batch, counted on a stand-in of a GPU (no GPU is used)."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from rlhf.interfaces import ModelSpec
from rlhf.ops.loss_value import over_mask
from rlhf.ops.packing import SequenceData, UnitData, pack
from rlhf.ops.reduce import weigh
from rlhf.types import RoleSpec
from rlhf_algorithms.critic import Value
from rlhf_algorithms.policy_losses import GSPO, PPOConfig, PPOLoss
from rlhf_modeling.flash_attention import lay_out
from rlhf_modeling.shared_prefixes import share_prefixes
from rlhf_plugin_dpo.loss import DPOLoss
from rlhf_plugin_kto.loss import KTOLoss
from rlhf_plugin_local.trainer import TorchTrainer, TorchTrainerConfig
from rlhf_plugin_reward_model import PairwiseLoss
from rlhf_plugin_sft import NLL
from rlhf_testing.tiny import tiny_model

from tests.support.stand_in_gpu import CUDA, gpu_stand_in

LOSSES = {
    "ppo": PPOLoss(PPOConfig(entropy_coef=0.01, correction={"preset": "tis"}, stale_mask=0.5)),
    "gspo": GSPO(),
    "value": Value(),
    "sft": NLL(),
    "dpo": DPOLoss(),
    "pairwise": PairwiseLoss(),
    "kto": KTOLoss(),
}
HEADS = {"value": "scalar", "pairwise": "scalar"}
WAITS = {"kto": 5}
"""Every loss reads its value and its metrics at once. A metric of a selection of units waits for each."""
PROMPT = list(range(5, 45))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("tiny"))


def batch_of(loss):
    pair = [SequenceData([*PROMPT, *end], {"loss_mask": [False] * 40 + [True] * len(end)}) for end in ([3, 4], [6])]
    batch = pack([UnitData([replace(s, role=r) for r, s in enumerate(pair)]) for _ in range(2)])
    for name in loss.columns():
        if name in ("label", "kl"):
            batch = batch.with_column("unit", name, torch.tensor([True, False]) if name == "label" else torch.ones(2))
        elif name not in ("margin", "pushes"):
            batch = batch.with_column("tok", name, torch.linspace(-1, 1, batch.tokens))
    return weigh(batch, loss.reduce())


@pytest.mark.parametrize("name", LOSSES)
def test_a_micro_batch_waits_once_for_the_stand_in_of_a_gpu(name, folder):
    loss, role = LOSSES[name], RoleSpec("policy", HEADS.get(name, "lm"), True)
    trainer = TorchTrainer(TorchTrainerConfig(lr=1e-3, device="cpu"), ModelSpec(role, str(folder), "fp32"))
    resolved = [trainer._head(output, over_mask(loss)) for output in loss.outputs()]
    results = []
    for reads_host in (True, False):
        trainer.zero_grad()
        trainer.loaded_model.device = CUDA if reads_host else None
        with gpu_stand_in(trainer.module) as waits:
            batch = batch_of(loss).to(CUDA)
            batch = batch if reads_host else replace(batch, source=None)
            sums = trainer._micro(batch, loss, resolved, {}, {}, True)
        results.append((sums, trainer.gradients()))
        assert waits.total() == WAITS.get(name, 1) if reads_host else waits.total() > 20, +waits
    (sums, gradients), (plain_sums, plain_gradients) = results
    assert sums == plain_sums
    assert all(torch.equal(gradients[key], value) for key, value in plain_gradients.items())


def test_log_probs_wait_once_for_the_stand_in_of_a_gpu(folder):
    spec = ModelSpec(RoleSpec("policy", "lm", False), str(folder), "fp32")
    trainer = TorchTrainer(TorchTrainerConfig(device="cpu"), spec)
    trainer.device = trainer.loaded_model.device = CUDA
    with gpu_stand_in(trainer.module) as waits:
        trainer.forward([batch_of(LOSSES["sft"])], ["logprobs"])
    assert +waits == {"cpu": 1}


def test_boundaries_of_flash_attention_reach_the_stand_in_of_a_gpu_without_a_wait():
    batch = batch_of(LOSSES["sft"])
    shared = share_prefixes(batch.ids_N, batch.lens_B.tolist())
    with gpu_stand_in(torch.nn.Module()) as waits:
        lines = lay_out(shared.stretches, len(shared.ids_M), shared.place_N, CUDA)
        assert {x.device for x in (lines.keys, lines.ends_Q, lines.ends_K)} == {CUDA}
    assert not +waits
