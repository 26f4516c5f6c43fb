"""Tokens and masks of real rows of HH and GSM8K."""

from __future__ import annotations

import gzip
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rlhf_runtime.config.data_section import DataSection, SourceSection
from rlhf_runtime.data.dataset import TrainData

from examples.gsm8k.prepare import cleaned
from tests.real_model.plain import DATA, MODEL, chatml, needs_model, needs_rows

pytestmark = [pytest.mark.slow, needs_model, needs_rows]


def turns(prompt: str) -> list[dict[str, str]]:
    """The messages of HH's text before the last answer."""
    roles = {"Human": "user", "Assistant": "assistant"}
    parts = prompt.split("\n\n")
    messages: list[dict[str, str]] = []
    for part in parts[1:]:
        name, colon, text = part.partition(":")
        if colon and name in roles:
            messages.append({"role": roles[name], "content": text.strip()})
        elif messages:  # an empty line inside a message
            messages[-1]["content"] += "\n\n" + part
    return messages


def gsm8k() -> list[dict[str, Any]]:
    with (DATA / "gsm8k_train.jsonl").open(encoding="utf-8") as file:
        rows = cleaned([json.loads(line) for line in itertools.islice(file, 200)])
    return [{"prompt": [{"role": "user", "content": r["question"]}], "response": r["answer"]} for r in rows]


def hh() -> list[dict[str, Any]]:
    with gzip.open(DATA / "hh_harmless_pairs.jsonl.gz", "rt", encoding="utf-8") as file:
        parts = (json.loads(line)["chosen"].rpartition("\n\nAssistant:") for line in file)
        rows = ({"prompt": turns(prompt), "response": answer.strip()} for prompt, _, answer in parts if answer.strip())
        return list(itertools.islice(rows, 200))


@pytest.mark.parametrize("rows", [gsm8k, hh])
def test_tokens_and_masks_of_200_real_rows_are_those_of_the_template_written_by_hand(
    rows: Callable[[], list[dict[str, Any]]], tmp_path: Path
) -> None:
    from transformers import AutoTokenizer

    tokenizer, examples = AutoTokenizer.from_pretrained(str(MODEL)), rows()
    assert len(examples) == 200
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in examples))
    section = DataSection(train=(SourceSection(path=str(file)),), shuffle=False, max_tokens=8192)
    data = TrainData(section, tokenizer, "demonstrations", seed=0)
    (source,) = data.sources["train"]
    for number, row in enumerate(examples):
        (sequence,) = data.judge(source[number]).example.sequences
        pieces = chatml(row["prompt"], row["response"])
        encoded = tokenizer("".join(text for text, _ in pieces), return_offsets_mapping=True, add_special_tokens=False)
        begin = len("".join(text for text, _ in pieces[:-1]))
        assert list(sequence.ids) == encoded["input_ids"], row
        assert list(map(bool, sequence.loss_mask)) == [start >= begin for start, _ in encoded["offset_mapping"]], row
