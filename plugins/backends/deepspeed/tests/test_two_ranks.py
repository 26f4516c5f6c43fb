"""Two ranks give the numbers of the trainer ``torch`` in every stage, and resume from what one or two ranks saved."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from rlhf.interfaces import ModelSpec
from rlhf_modeling.optimizer import build_optimizer
from rlhf_plugin_deepspeed.config import DeepSpeedTrainerConfig
from rlhf_plugin_local.trainer import TorchTrainer
from rlhf_testing.suite_losses import ValueLoss
from zero_cases import one_rank
from zero_ranks import ZeroRanks

from tests.support.rank_batches import apart, spec
from tests.support.rank_tests import reads
from tests.support.token_parts import CASES
from tests.support.trainer_ranks import Reference, TrainerRanksContract

pytestmark = pytest.mark.slow

FULL_VARIANTS = (
    "checkpointing-3", "whole-3", "bucket-3", "hpz-3", "host-3", "muon-3", "dora-3", "stored-2", "stored-hpz-3",
    "stored-lora-3",
)  # fmt: skip
ROWS = ("tokens", "adapters")
"""How tokens of a row are divided is the same code as under FSDP, whose test has the other cases of every run."""


class TorchMuon:
    """torch's Muon and AdamW, each for the parameters that the trainer's optimizer gives to it."""

    def __init__(self, trainer: TorchTrainer) -> None:
        excluded_ids = {
            id(p) for m in (trainer.module.get_input_embeddings(), trainer.loaded_model.head) for p in m.parameters()
        }
        config = DeepSpeedTrainerConfig(lr=1e-3, weight_decay=0.1, optimizer="muon")
        shapes = {name: p.shape for name, p in trainer.parameters.items()}
        matrices, *rest = build_optimizer(trainer.parameters, shapes, excluded_ids, config).param_groups
        keep = ("params", "weight_decay")
        muon = torch.optim.Muon(matrices["params"], lr=1e-3, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
        adamw = torch.optim.AdamW([{k: g[k] for k in keep} for g in rest], lr=1e-3, betas=(0.9, 0.95))
        self.both = (muon, adamw)
        self.param_groups = [*muon.param_groups, *adamw.param_groups]

    def step(self) -> None:
        for optimizer in self.both:
            optimizer.step()


def torch_on_one_rank(model_spec: ModelSpec, optimizer: str = "adamw", **options: Any) -> TorchTrainer:
    single = one_rank(model_spec, **options)
    if optimizer == "muon":
        single.optimizer = TorchMuon(single)
    return single


class TestTwoRanks(TrainerRanksContract):
    cases = ZeroRanks
    one_rank = staticmethod(torch_on_one_rank)
    gathered = 2000
    full = (
        "critic_state", "images", "lora", "rows_resume", *(f"variant-{name}" for name in FULL_VARIANTS),
        *(f"rows-{name}" for name in CASES if name not in ROWS),
    )  # fmt: skip

    @reads("frozen")
    def test_stage_3_divides_a_role_that_is_not_trained(self, ranks, layout):
        for report in ranks("frozen", layout):
            assert (report["largest"] == 0) == (layout == "3")

    @pytest.mark.full
    @reads("hpz")
    def test_several_roles_of_one_process_can_have_second_copies(self, ranks):
        """DeepSpeed itself fails with an assertion at the second model with ZeRO++."""
        reference = Reference(one_rank(spec(ranks.folder, head="scalar")), ValueLoss(), 2)
        assert apart(ranks.tensors("weights-hpz-critic"), reference.weights) < 1e-4
        for rank in ranks("hpz"):
            assert rank["same"]
            assert rank["unmoved"] == 0
            assert rank["left"] < 1e-6
            assert rank["copies"] == [0, *rank["parameters"][1:]], "only the plain policy has no second copies"

    @reads("refused")
    def test_groups_with_another_size_or_other_roles_are_refused(self, ranks):
        for rank, messages in enumerate(ranks("refused")):
            single, port, size, differ = messages
            for text in (single, port, size):
                assert text.startswith("CapabilityError: role 'policy', rank ")
                assert "is already a rank of a group of 2" in text
            assert f"rank {rank} of 2" in port
            assert "have different settings of the role: " in differ
            assert "'scalar'" in differ

    @reads("nobody")
    def test_a_rank_that_meets_no_other_rank_is_an_error(self, ranks):
        for rank, message in enumerate(ranks("nobody")):
            start = (
                f"WorkerError: role 'policy', rank {rank} of 2 could not connect to the other ranks at tcp://127.0.0.1:"
            )
            assert message.startswith(start)
            assert "within 2 s" in message
