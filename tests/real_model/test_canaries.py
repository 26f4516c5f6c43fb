"""Canaries of a sync between two bf16 copies of a pretrained model: its rounding passes, a wrong layer does not."""

from __future__ import annotations

import random

import torch
from rlhf_runtime.models.weight_sync import BF16_TOLERANCE, CANARY_TOKENS, canary_differences, text_canary

from tests.real_model.plain import MODEL, needs_model

pytestmark = needs_model


def test_rounding_passes_and_a_wrong_layer_is_seen() -> None:
    from transformers import AutoModelForCausalLM

    draw = random.Random(0)
    trainer, engine = (
        AutoModelForCausalLM.from_pretrained(str(MODEL), dtype=t) for t in (torch.float32, torch.bfloat16)
    )
    canaries = [text_canary(draw, trainer.config.vocab_size, CANARY_TOKENS) for _ in range(4)]
    ids_BT = torch.tensor([canary.ids for canary in canaries])

    def logprobs(model: torch.nn.Module) -> torch.Tensor:
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=model is trainer):
            logits_BTV = model(ids_BT).logits[:, :-1].float()
        return -torch.nn.functional.cross_entropy(logits_BTV.mT, ids_BT[:, 1:], reduction="none")

    def differences() -> list[float]:
        ours_BT = torch.nn.functional.pad(logprobs(trainer), (1, 0))
        return canary_differences(canaries, ours_BT.flatten(), [logprobs(engine).tolist()], coarse=True)

    assert max(differences()) < BF16_TOLERANCE
    with torch.no_grad():
        engine.model.layers[15].mlp.down_proj.weight.zero_()
    assert max(differences()) > BF16_TOLERANCE
