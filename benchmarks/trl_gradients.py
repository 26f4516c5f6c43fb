"""Gradients of TRL on the batches of gate.json: its own compute_loss, called on tensors as its trainers build them."""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from settings import THREADS
from torch import Tensor
from trl_train import Options, common, flash, grpo_trainer, load, sft_trainer


def padded(rows: list[list[int]], value: int, left: bool = False) -> tuple[Tensor, Tensor]:
    """([B, T] tokens, [B, T] mask)."""
    width = max(map(len, rows))
    ids, mask = torch.full((len(rows), width), value), torch.zeros(len(rows), width, dtype=torch.int64)
    for i, row in enumerate(rows):
        span = slice(width - len(row), width) if left else slice(0, len(row))
        ids[i, span], mask[i, span] = torch.tensor(row), 1
    return ids, mask


def grpo_inputs(groups: list[dict[str, Any]], pad: int) -> dict[str, Tensor]:
    """Advantages as TRL computes them, but with our 1e-9 added to the standard deviation in place of its 1e-4."""
    prompts = [g["prompt"] for g in groups for _ in g["answers"]]
    prompt_ids, prompt_mask = padded(prompts, pad, left=True)
    completion_ids, completion_mask = padded([a for g in groups for a in g["answers"]], pad)
    rewards = torch.tensor([g["rewards"] for g in groups], dtype=torch.float64)
    advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-9)
    return {
        "prompt_ids": prompt_ids,
        "prompt_mask": prompt_mask,
        "completion_ids": completion_ids,
        "completion_mask": completion_mask,
        "advantages": advantages.flatten().float(),
        "num_items_in_batch": completion_mask.sum(),
    }


def sft_inputs(trainer: Any, rows: list[dict[str, Any]], packed: bool) -> dict[str, Any]:
    """What TRL's collator makes of the rows, or of one row that packs them."""
    examples = [
        {"input_ids": r["prompt"] + r["answer"], "labels": [-100] * len(r["prompt"]) + r["answer"]} for r in rows
    ]
    if packed:
        lengths = [len(e["input_ids"]) for e in examples]
        row = {name: [x for e in examples for x in e[name]] for name in ("input_ids", "labels")}
        examples = [row | {"seq_lengths": lengths}]
    return dict(trainer.data_collator(examples))


def save(
    work: Path,
    workload: str,
    precision: str = "fp32",
    options: Options | None = None,
    attention: str | None = None,
) -> None:
    """``grpo`` or ``sft``: gradients on the batch of gate.json, in ``trl-WORKLOAD.safetensors``."""
    gate, options = json.loads((work / "gate.json").read_text()), options or {}
    model, tokenizer = load(work / "model", attention=flash() if attention == "flash" else attention)
    with tempfile.TemporaryDirectory() as folder:
        fields = common(precision, 1, folder) | options
        if workload == "grpo":
            trainer = grpo_trainer(model, tokenizer, ["1+1="] * 256, fields, forced=True)
            inputs: dict[str, Any] = grpo_inputs(gate["grpo"], tokenizer.pad_token_id)
        else:
            trainer = sft_trainer(model, tokenizer, [{"prompt": "1+1=", "completion": "2"}] * 16, fields)
            inputs = sft_inputs(trainer, gate["sft"], bool(options.get("packing")))
    if options.get("use_liger_kernel"):  # its training loop does this
        from transformers.integrations.liger import apply_liger_kernel

        apply_liger_kernel(trainer.model, trainer.args.liger_kernel_config)
    trainer.current_gradient_accumulation_steps = 1  # set by its training loop
    trainer.model.train()
    place = trainer.model.device
    inputs = {key: value.to(place) if isinstance(value, Tensor) else value for key, value in inputs.items()}
    with trainer.accelerator.autocast():
        loss = trainer.compute_loss(trainer.model, inputs)
    loss.backward()
    gradients = {n: p.grad.cpu().contiguous() for n, p in trainer.model.named_parameters() if p.grad is not None}
    save_file(gradients, str(work / f"trl-{workload}.safetensors"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, required=True)
    work = parser.parse_args().work
    torch.set_num_threads(THREADS)
    for workload in ("grpo", "sft"):
        save(work, workload)


if __name__ == "__main__":
    main()
