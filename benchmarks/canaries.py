"""What canaries of a weight sync show of a real model in bf16: its rounding, and faults planted in one layer or in all.

    python benchmarks/canaries.py FOLDER_OF_A_LLAMA_MODEL [--fp8]

The trainer computes with fp32 weights and bf16 products, the engine with bf16 weights, both in transformers. With --fp8
the engine rounds weights and inputs of linear layers as vLLM's ``fp8_per_channel`` does.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable
from typing import Any

import torch
from rlhf_runtime.models.weight_sync import CANARY_TOKENS, text_canary
from torch import Tensor

RIGHT, WRONG = 240, 48
"""Canaries without a fault, and with each fault."""


def swap_layers(model: Any) -> None:
    layers, middle = model.model.layers, len(model.model.layers) // 2
    layers[middle], layers[middle + 1] = layers[middle + 1], layers[middle]


def lose_feed_forward(model: Any) -> None:
    model.model.layers[len(model.model.layers) // 2].mlp.down_proj.weight.zero_()


def take_neighbours_keys(model: Any) -> None:
    middle = len(model.model.layers) // 2
    layer, neighbour = (model.model.layers[n].self_attn.k_proj.weight for n in (middle, middle + 1))
    layer.copy_(neighbour)


def add_noise(model: Any, share: float) -> None:
    torch.manual_seed(0)
    for weight in model.parameters():
        weight.mul_(1 + share * torch.randn_like(weight))


FAULTS: dict[str, Callable[[Any], None]] = {
    "a layer without its feed-forward part": lose_feed_forward,
    "a layer with its neighbour's keys": take_neighbours_keys,
    "two layers in each other's place": swap_layers,
    "rotary frequencies x 0.7": lambda model: model.model.rotary_emb.inv_freq.mul_(0.7),
    "noise of 1 % on all weights": lambda model: add_noise(model, 0.01),
    "noise of 5 % on all weights": lambda model: add_noise(model, 0.05),
}


def quantise(model: Any) -> None:
    from rlhf_plugin_vllm.worker.quantized import quantised

    def of_tokens(layer: Any, inputs: Any) -> Any:
        [x_BTK] = inputs
        return (quantised(x_BTK.flatten(0, -2)).view(x_BTK.shape).to(x_BTK.dtype),)

    for name, layer in model.named_modules():
        if isinstance(layer, torch.nn.Linear) and name != "lm_head":
            layer.weight.copy_(quantised(layer.weight))
            layer.register_forward_pre_hook(of_tokens)


def logprobs(model: Any, ids_BT: Tensor, autocast: bool) -> Tensor:
    parts = []
    for part_BT in ids_BT.split(8):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            logits_BTV = model(part_BT, use_cache=False).logits[:, :-1].float()
        parts.append(-torch.nn.functional.cross_entropy(logits_BTV.mT, part_BT[:, 1:], reduction="none"))
    return torch.cat(parts)


def row(name: str, apart_BT: Tensor) -> str:
    """Two canaries are those of a sync (``sync.canaries``)."""
    sync_PT = apart_BT.view(len(apart_BT) // 2, -1)
    parts = (apart_BT.mean(1), apart_BT.median(1).values, sync_PT.median(1).values)
    cells = [f"{x.min():.2f} to {x.max():.2f} ({x.median():.2f})" for x in parts]
    return f"| {name} | {' | '.join(cells)} | {apart_BT.max():.1f} |"


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="folder of a model of transformers' class LlamaForCausalLM")
    parser.add_argument("--fp8", action="store_true", help="the engine computes in fp8")
    arguments = parser.parse_args()
    path = arguments.model
    from transformers import AutoModelForCausalLM

    def load(dtype: torch.dtype) -> Any:
        return AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()

    trainer, draw = load(torch.float32), random.Random(0)
    vocabulary = trainer.config.vocab_size
    ids_BT = torch.tensor([text_canary(draw, vocabulary, CANARY_TOKENS).ids for _ in range(RIGHT)])
    ours_BT = logprobs(trainer, ids_BT, autocast=True)
    print(
        "| engine | mean of a canary: range (middle) | median of a canary | median of two | largest of one token |\n"
        "|---|---|---|---|---|"
    )
    for name, plant in {"right": lambda model: None, **FAULTS}.items():
        engine = load(torch.bfloat16)
        plant(engine)
        if arguments.fp8:
            quantise(engine)
        count = RIGHT if name == "right" else WRONG
        print(row(name, (logprobs(engine, ids_BT[:count], False) - ours_BT[:count]).abs()), flush=True)


if __name__ == "__main__":
    main()
