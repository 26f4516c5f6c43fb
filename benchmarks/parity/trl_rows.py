"""Rows as TRL's trainers tokenise and collate them. Runs in the environment that has TRL.

.venv-peers/bin/python benchmarks/parity/trl_rows.py --work FOLDER --result FILE [--cases NAME ...]
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from answering import answer
from row_cases import CASES, TEMPLATES, RowCase
from trl_losses import classes

AT_ONCE = 16


def config(case: RowCase, folder: str) -> dict[str, Any]:
    return {
        "output_dir": folder,
        "max_steps": 1,
        "per_device_train_batch_size": AT_ONCE,
        "use_cpu": True,
        "bf16": False,
        "train_sampling_strategy": "sequential",
        "gradient_checkpointing": False,
        "max_length": case.max_tokens,
        "report_to": "none",
        "disable_tqdm": True,
        **case.trl,
    }


def sequences(ids: Any, present: Any, trained: Any) -> list[list[Any]]:
    """[B, T] ids, attention mask and mask of the trained tokens (None: there are none) as [[ids, mask], ...]. The mask
    of a first token is 0, because nothing predicts it."""
    result = []
    for i in range(len(ids)):
        token_mask = present[i].bool()
        mask = "" if trained is None else "0" + "".join(str(int(on)) for on in trained[i][token_mask][1:])
        result.append([ids[i][token_mask].tolist(), mask])
    return result


def rows_of(case: RowCase, inputs: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of one batch as its collator made them: for a pair the chosen sequence, then the rejected one; for a row
    with a label its own, then the one with the answer of another row."""
    values = {name: inputs[name].tolist() for name in ("label", "margin") if name in inputs}
    if case.trainer in ("cpo", "orpo"):
        columns = [
            sequences(inputs[f"{s}_input_ids"], inputs[f"{s}_attention_mask"], inputs[f"{s}_labels"] >= 0)
            for s in ("chosen", "rejected")
        ]
    elif case.trainer == "kto":
        columns = [
            sequences(*(inputs[f"{twin}{key}"] for key in ("input_ids", "attention_mask", "completion_mask")))
            for twin in ("", "KL_")
        ]
    else:
        trained = inputs["labels"] >= 0 if case.trainer == "sft" else inputs.get("completion_mask")
        items = sequences(inputs["input_ids"], inputs["attention_mask"], trained)
        half = len(items) // 2
        columns = [items[:half], items[half:]] if case.form == "pairs" else [items]
    rows = [list(row) for row in zip(*columns, strict=True)]
    return [{"sequences": row, **{k: v[i] for k, v in values.items()}} for i, row in enumerate(rows)]


def encoded(case: RowCase, work: Path) -> list[dict[str, Any] | None]:
    """Every row of a case; None for a row that was left out."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

    head = "scalar" if case.trainer == "reward" else "lm"
    auto = AutoModelForSequenceClassification if head == "scalar" else AutoModelForCausalLM
    model = auto.from_pretrained(str(work / head), dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(str(work / case.tokenizer))
    tokenizer.chat_template = TEMPLATES[case.template]
    config_class, trainer_class = classes(case.trainer)
    with tempfile.TemporaryDirectory() as folder:
        data = Dataset.from_list([{**row, "number": number} for number, row in enumerate(case.rows)])
        trainer = trainer_class(
            model, args=config_class(**config(case, folder)), train_dataset=data, processing_class=tokenizer
        )
        numbers = list(trainer.train_dataset["number"])
        (batch,) = list(trainer.get_train_dataloader())
    by_number = dict(zip(numbers, rows_of(case, batch), strict=True))
    return [by_number.get(number) for number in range(len(case.rows))]


def main() -> None:
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    torch.set_num_threads(1)
    answer(__doc__, CASES, encoded, ("trl", "transformers", "tokenizers"))


if __name__ == "__main__":
    main()
