"""One rank: weights that are stored in bf16, with fp32 masters in DeepSpeed's optimizer."""

from __future__ import annotations

import pytest
from rlhf.errors import CapabilityError
from rlhf_testing.suite_losses import TokenLoss
from zero_cases import one_rank, trainer

from tests.support.rank_batches import batch, spec
from tests.support.rank_case import held
from tests.support.trainer_rank_checks import same_bits
from tests.support.trainer_ranks_storage import STORED, StoredContract, masters

STAGES = ("3", "2", "host-2", "host-3")
MUON = ("muon-2", "muon-3")


class TestStored(StoredContract):
    make = staticmethod(trainer)
    one_rank = staticmethod(one_rank)
    stored = {
        "3": {"stage": 3},
        "2": {"stage": 2},
        "0": {"stage": 0},
        "host-2": {"stage": 2, "offload_optimizer": "cpu"},
        "host-3": {"stage": 3, "offload_optimizer": "cpu", "offload_params": "cpu"},
        "muon-2": {"stage": 2, "optimizer": "muon"},
        "muon-3": {"stage": 3, "optimizer": "muon"},
    }
    only = {
        "steps": (*STAGES, *MUON),
        **dict.fromkeys(("lost", "restart"), STAGES),
        **dict.fromkeys(("average", "loaded", "lent", "adapters", "export"), ("3", "2")),
        "frozen": ("3", "0"),
    }
    full = (
        "lost", "average", "loaded", "lent", "adapters", "export-2",
        *(f"{case}-{name}" for case in ("steps", "restart") for name in (*STAGES[1:], *MUON)),
    )  # fmt: skip
    steps_apart = 0.02  # AdamW's first steps depend on the sign of tiny gradients

    def alike(self, options):
        """Stage 3 has transformers' own layers."""
        return {**super().alike(options), "kernels": "none" if options["stage"] == 3 else "auto"}

    @pytest.mark.full
    def test_another_stage_continues_with_the_same_masters(self, folder, tmp_path):
        source, other = (trainer(spec(folder, **STORED), stage=stage) for stage in (2, 3))
        source.update([batch(0)], TokenLoss(), {}, {})
        source.save(tmp_path)
        other.load(tmp_path)
        same_bits(masters(other), masters(source).items(), "masters")
        same_bits(held(other), held(source).items(), "weights")

    @pytest.mark.parametrize("stage", [0, 1])
    def test_stages_that_would_add_gradients_in_bf16_are_refused(self, folder, stage):
        with pytest.raises(CapabilityError, match="needs stage 2 or 3, got stage"):
            trainer(spec(folder, **STORED), stage=stage)
