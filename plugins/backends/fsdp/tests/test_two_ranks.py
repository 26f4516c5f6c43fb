"""Two ranks give the numbers of the trainer ``torch``, and resume from checkpoints of one or two ranks."""

from __future__ import annotations

import pytest
import torch
from fsdp_cases import one_rank, trainer
from fsdp_ranks import STORED, FsdpRanks

from tests.support.rank_batches import spec
from tests.support.rank_tests import reads
from tests.support.token_parts import CASES, IN_EVERY_RUN
from tests.support.trainer_ranks import TrainerRanksContract

pytestmark = pytest.mark.slow


class TestTwoRanks(TrainerRanksContract):
    cases = FsdpRanks
    one_rank = staticmethod(one_rank)
    full = (
        "alone", "base", "critic", "critic_state", "dropout", "experts", "export", "from_one", "frozen", "images",
        "lent", "lora", "rows_resume", "skip", "timeout", "variant",
        *(f"rows-{name}" for name in CASES if name not in IN_EVERY_RUN),
    )  # fmt: skip

    @reads("equal")
    def test_a_rank_holds_its_part_only(self, ranks, reference):
        total = sum(p.numel() for p in reference.trainer.parameters.values())
        parts = [report["elements"] for report in ranks("equal", "default")]
        assert sum(parts) == total
        assert parts[0] == pytest.approx(total / 2, rel=0.02)

    @pytest.mark.full
    @reads("kept")
    def test_a_rank_keeps_half_of_the_activations(self, ranks):
        for full_bytes, half in ranks("kept"):
            assert half == pytest.approx(full_bytes / 2, rel=0.1)

    @reads("masters")
    def test_masters_are_resumed_exactly_on_two_ranks_and_on_one(self, ranks):
        for report in ranks("masters"):
            assert report["bits"]
            assert report["steps"][0] == report["steps"][1]
        policy = trainer(spec(ranks.folder, **STORED), ema_decay=0.9)
        for name, folder in (("masters", "saved-stored"), ("masters-from-one", "from_one_stored")):
            policy.load(ranks.folder / folder)
            masters = {flat.names[0]: flat.data for flat in policy.partition.flats}
            counts = dict.fromkeys(masters, 0)
            for rank in (0, 1):
                for key, part in ranks.tensors(f"{name}-{rank}").items():
                    flat_name, _, start = key.rpartition(":")
                    assert part.dtype == torch.float32
                    assert torch.equal(part, masters[flat_name][int(start) : int(start) + part.numel()])
                    counts[flat_name] += part.numel()
            assert counts == {flat_name: tensor.numel() for flat_name, tensor in masters.items()}

    @pytest.mark.full
    @reads("bytes")
    def test_weights_in_bf16_are_gathered_and_sent_in_half_the_bytes(self, ranks):
        for report in ranks("bytes"):
            assert all(report["fp32"])
            assert report["fp32"] == [2 * count for count in report["bf16"]]
