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
from trl_train import common, grpo_trainer, load, sft_trainer


def padded(rows: list[list[int]], value: int, left: bool = False) -> tuple[Tensor, Tensor]:
    """([B, T] tokens, [B, T] mask)."""
    width = max(map(len, rows))
    ids, mask = torch.full((len(rows), width), value), torch.zeros(len(rows), width, dtype=torch.int64)
    for i, row in enumerate(rows):
        where = slice(width - len(row), width) if left else slice(0, len(row))
        ids[i, where], mask[i, where] = torch.tensor(row), 1
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


def sft_inputs(rows: list[dict[str, Any]], pad: int) -> dict[str, Tensor]:
    ids, mask = padded([r["prompt"] + r["answer"] for r in rows], pad)
    labels = ids.masked_fill(mask == 0, -100)
    for i, row in enumerate(rows):
        labels[i, : len(row["prompt"])] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, required=True)
    work = parser.parse_args().work
    torch.set_num_threads(THREADS)
    gate = json.loads((work / "gate.json").read_text())
    for workload in ("grpo", "sft"):
        model, tokenizer = load(work / "model")
        with tempfile.TemporaryDirectory() as folder:
            options = common("fp32", 1, folder)
            if workload == "grpo":
                trainer = grpo_trainer(model, tokenizer, ["1+1="] * 256, options, forced=True)
                inputs = grpo_inputs(gate["grpo"], tokenizer.pad_token_id)
            else:
                trainer = sft_trainer(model, tokenizer, [{"prompt": "1+1=", "completion": "2"}] * 16, options)
                inputs = sft_inputs(gate["sft"], tokenizer.pad_token_id)
            trainer.current_gradient_accumulation_steps = 1  # set by its training loop
            trainer.model.train()
            inputs = {name: value.to(trainer.model.device) for name, value in inputs.items()}
            trainer.compute_loss(trainer.model, inputs).backward()
        named = trainer.model.named_parameters()
        found = {n: p.grad.cpu().clone().contiguous() for n, p in named if p.grad is not None}
        save_file(found, str(work / f"trl-{workload}.safetensors"))


if __name__ == "__main__":
    main()
