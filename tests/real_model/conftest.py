"""Fixtures of the tests of a pretrained chat model, SmolLM2-135M-Instruct.

`make quickstart` puts the model into the user's cache; RLHF_REAL_MODEL names another folder. RLHF_DATA names a folder
with the rows of HH and GSM8K (examples/preferences/README.md). Tests without their model or rows are skipped.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.real_model.plain import DIALOGUES, MODEL, Plain
from tests.runs import Workshop


@pytest.fixture(scope="module")
def fp64() -> Plain:
    return Plain.load(MODEL, torch.float64)


@pytest.fixture(scope="module")
def answers(fp64: Plain) -> dict[str, list[Tensor]]:
    """{chosen, rejected: log-probs of every answer}."""
    return {
        role: [fp64.answer(row["prompt"], row[role][0]["content"]) for row in DIALOGUES]
        for role in ("chosen", "rejected")
    }


@pytest.fixture(scope="module")
def cut(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first four layers of the model, with its embedding, tokenizer and template."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = tmp_path_factory.mktemp("cut") / "model"
    model = AutoModelForCausalLM.from_pretrained(str(MODEL), dtype=torch.float32)
    model.model.layers = model.model.layers[:4]
    model.config.num_hidden_layers = 4
    model.save_pretrained(str(folder))
    AutoTokenizer.from_pretrained(str(MODEL)).save_pretrained(str(folder))
    return folder


@pytest.fixture
def real(tmp_path: Path) -> Iterator[Workshop]:
    """Runs of the whole model. A run leaves 2 GB."""
    shop = Workshop(tmp_path, MODEL, tmp_path / "rows.jsonl")
    shop.rows("rows.jsonl", DIALOGUES)
    yield shop
    shutil.rmtree(tmp_path)
