"""One rank: weights that are stored in bf16."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from fsdp_cases import one_rank, trainer
from rlhf.errors import CapabilityError
from rlhf.interfaces.memory import TrainerWork
from rlhf_cli.plan.model_size import read_size
from rlhf_plugin_fsdp.trainer import FsdpTrainer, storage
from transformers.models.qwen3.modeling_qwen3 import Qwen3PreTrainedModel

from tests.support.rank_batches import batch, spec
from tests.support.trainer_rank_cases import DORA
from tests.support.trainer_ranks_storage import STORED, StoredContract

UNROUNDED = hasattr(torch.Tensor, "_has_grad_dtype_override")
"""From torch 2.15 FSDP adds the fp32 gradients of norms without rounding them to bf16 first, as autograd does."""


class TestStored(StoredContract):
    gradients_apart, steps_apart = (2**-8, 1e-3) if UNROUNDED else (0.0, 1e-4)
    make = staticmethod(trainer)
    one_rank = staticmethod(one_rank)
    stored = {
        "default": {},
        "whole": {"reshard_after_forward": False},
        "muon": {"optimizer": "muon", "max_grad_norm": None},
        "lora": {"lora": {"rank": 4}},
        "dora": {"lora": DORA},
    }
    only = {"steps": tuple(stored), "restart": ("default", "muon", "dora")}
    full = ("steps-whole", "steps-muon", "steps-lora", "steps-dora", "restart-muon", "restart-dora", "lent", "adapters")

    @pytest.mark.full
    def test_masters_of_adapters_are_the_parameters(self, folder):
        critic = trainer(spec(folder, head="scalar", **STORED), lora={"rank": 4})
        assert {p.dtype for p in critic.parameters.values()} == {torch.float32}
        assert critic.tensors.rounded == critic.parameters.keys()

    def test_a_model_that_keeps_some_weights_of_a_layer_in_fp32_is_refused(self, folder, monkeypatch):
        """FSDP gathers the trained weights of a layer in one number format."""
        monkeypatch.setattr(Qwen3PreTrainedModel, "_keep_in_fp32_modules_strict", {"q_norm"})
        with pytest.raises(CapabilityError, match=r"Qwen3DecoderLayer has 'self_attn.q_norm.weight' in fp32 beside '"):
            trainer(spec(folder, **STORED))
        assert trainer(spec(folder, trained=False, **STORED)).forward([batch(0)], ("logprobs",))

    def test_planned_memory(self, folder):
        """Of trained weights a rank keeps the masters only; a frozen role keeps bf16. What is gathered has half the
        bytes."""
        size, work = read_size(str(folder / "model")), TrainerWork(32, 32, 8, micro_tokens=64, annotated=())

        def plan(trained: bool, stored: str):
            model_spec = replace(spec(folder, trained=trained, dtype="bf16", storage=stored), world_size=4)
            return storage(FsdpTrainer.Config(), model_spec, size, "cuda"), FsdpTrainer.memory(
                FsdpTrainer.Config(), model_spec, size, work, "cuda"
            )

        (fp32, wide), (bf16, narrow) = plan(True, "fp32"), plan(True, "bf16")
        assert narrow.phases["rest"].device == wide.phases["rest"].device
        assert narrow.phases["rest"].device["weights"] == size.parameters * 4 // 4
        largest = max(size.layers[0].parameters, size.parameters - sum(x.parameters for x in size.layers))
        assert fp32.gathered - 8 * largest == 2 * (bf16.gathered - 6 * largest)
        (fp32, wide), (bf16, narrow) = plan(False, "fp32"), plan(False, "bf16")
        assert wide.phases["rest"].device["weights"] == 2 * narrow.phases["rest"].device["weights"]
        assert fp32.gathered == 2 * bf16.gathered
