"""Losses of TRL's trainers at every optimizer step, as its log states them. Runs in the environment that has TRL.

.venv-peers/bin/python benchmarks/parity/trl_losses.py --work FOLDER --result FILE [--cases NAME ...]
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from answering import answer
from cases import CASES, MAX_TOKENS, ROWS, STEPS, TRAINING, Case, digest, rows, unpaired

Sequence = tuple[list[int], int | None]


def config(case: Case, folder: str) -> dict[str, Any]:
    training = {**TRAINING, **case.training}
    return {
        "output_dir": folder,
        "max_steps": STEPS,
        "per_device_train_batch_size": ROWS,
        "gradient_accumulation_steps": 1,
        "use_cpu": True,
        "bf16": False,
        "learning_rate": training["lr"],
        "adam_beta1": training["betas"][0],
        "adam_beta2": training["betas"][1],
        "adam_epsilon": training["eps"],
        "weight_decay": training["weight_decay"],
        "max_grad_norm": training["max_grad_norm"],
        "lr_scheduler_type": training["schedule"],
        "warmup_steps": 0,
        "train_sampling_strategy": "sequential",
        "gradient_checkpointing": False,
        "max_length": MAX_TOKENS,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        **case.trl,
    }


def classes(trainer: str) -> tuple[Any, Any]:
    """(config, trainer). CPO (which includes SimPO) and ORPO are in TRL's experimental package."""
    import trl

    if trainer == "cpo":
        from trl.experimental.cpo import CPOConfig, CPOTrainer

        return CPOConfig, CPOTrainer
    if trainer == "orpo":
        from trl.experimental.orpo import ORPOConfig, ORPOTrainer

        return ORPOConfig, ORPOTrainer
    stem = {"sft": "SFT", "dpo": "DPO", "kto": "KTO", "reward": "Reward"}[trainer]
    return getattr(trl, f"{stem}Config"), getattr(trl, f"{stem}Trainer")


def _sequences(ids: Any, present: Any, trained: Any) -> list[Sequence]:
    """[B, T] ids, attention mask and mask of the trained tokens (None: there are none)."""
    result: list[Sequence] = []
    for i in range(len(ids)):
        token_mask = present[i].bool()
        start = None if trained is None else int(trained[i][token_mask].bool().int().argmax())
        result.append((ids[i][token_mask].tolist(), start))
    return result


def seen(case: Case, inputs: dict[str, Any]) -> list[list[Sequence]]:
    """The rows of one batch as its collator made them."""
    if case.trainer in ("cpo", "orpo"):
        sides = [
            _sequences(
                *(inputs[f"{side}_{key}"] for key in ("input_ids", "attention_mask")), inputs[f"{side}_labels"] >= 0
            )
            for side in ("chosen", "rejected")
        ]
        return [list(pair) for pair in zip(*sides, strict=True)]
    trained = None
    if case.trainer == "sft":
        trained = inputs["labels"] >= 0
    elif case.trainer != "reward":
        trained = inputs["completion_mask"]
    sequences = _sequences(inputs["input_ids"], inputs["attention_mask"], trained)
    if case.form in ("pairs", "margins"):
        return [
            list(pair) for pair in zip(sequences[: len(sequences) // 2], sequences[len(sequences) // 2 :], strict=True)
        ]
    return [[sequence] for sequence in sequences]


def losses(case: Case, work: Path) -> dict[str, Any]:
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

    auto = AutoModelForSequenceClassification if case.head == "scalar" else AutoModelForCausalLM
    path = str(work / case.head)
    model, tokenizer = auto.from_pretrained(path, dtype=torch.float32), AutoTokenizer.from_pretrained(path)
    config_class, trainer_class = classes(case.trainer)
    batches: list[list[list[Sequence]]] = []
    with tempfile.TemporaryDirectory() as folder:
        given_rows = rows(case.form)
        if case.batch_size != ROWS:
            given_rows = unpaired(given_rows, case.batch_size)
        data = Dataset.from_list(given_rows)
        arguments = config_class(**config(case, folder))
        trainer = trainer_class(model, args=arguments, train_dataset=data, processing_class=tokenizer)
        compute_loss = trainer.compute_loss

        def noted(model: Any, inputs: Any, *rest: Any, **options: Any) -> Any:
            batches.append(seen(case, inputs))
            return compute_loss(model, inputs, *rest, **options)

        trainer.compute_loss = noted
        trainer.train()
        log = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    if len(log) != STEPS or len(batches) != STEPS:
        raise SystemExit(f"{case.name}: {len(log)} losses and {len(batches)} batches in {STEPS} steps")
    return {"losses": log, "tokens": digest(batches)}


def main() -> None:
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    torch.set_num_threads(1)
    answer(__doc__, CASES, losses, ("trl", "torch", "transformers", "accelerate"))


if __name__ == "__main__":
    main()
