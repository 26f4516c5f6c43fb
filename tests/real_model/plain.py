"""The model, rows for it, and what plain transformers computes with it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import log_softmax

from tests.members import ROOT

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
MODEL = Path(os.environ.get("RLHF_REAL_MODEL") or CACHE / "rlhf/models/SmolLM2-135M-Instruct")
DATA = Path(os.environ.get("RLHF_DATA") or ROOT.parent / "shared" / "data")
SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
"""The system message that the model's template adds."""


needs_model = pytest.mark.skipif(not (MODEL / "model.safetensors").exists(), reason=f"the model is not in {MODEL}")
needs_rows = pytest.mark.skipif(not (DATA / "gsm8k_train.jsonl").exists(), reason=f"no rows in {DATA}")

DIALOGUES = [
    {
        "prompt": [{"role": "user", "content": question}],
        "chosen": [{"role": "assistant", "content": chosen}],
        "rejected": [{"role": "assistant", "content": rejected}],
    }
    for question, chosen, rejected in (
        ("What is 17 + 25?", "17 + 25 = 42.", "17 + 25 = 32."),
        ("Name the capital of France.", "Paris.", "The capital of France is the city of Lyon, I think."),
        ("Is the sea blue?", "It often looks blue, because water absorbs red light first.", "no"),
        ("Write a word in capitals.", "HELLO", "hello, and here are some more words than were asked for"),
    )
]
QUESTIONS = [{"prompt": row["prompt"], "answer": "4"} for row in DIALOGUES]
SAMPLED: dict[str, Any] = {
    "data": {"batch_size": 2, "max_tokens": 128},
    "sampling": {"samples_per_prompt": 4, "max_new_tokens": 12},
}


def chatml(messages: Sequence[Mapping[str, str]], answer: str) -> list[tuple[str, bool]]:
    """The text of a conversation in pieces, each with whether it is trained on: the last answer and its end token."""
    pieces = [("" if messages[0]["role"] == "system" else f"<|im_start|>system\n{SYSTEM}<|im_end|>\n", False)]
    pieces += [(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n", False) for m in messages]
    return [*pieces, ("<|im_start|>assistant\n", False), (f"{answer}<|im_end|>", True)]


@dataclass(frozen=True)
class Plain:
    """The model in plain transformers, one sequence at a time."""

    model: Any
    tokenizer: Any

    @classmethod
    def load(cls, folder: Path, dtype: torch.dtype) -> Plain:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        model = AutoModelForCausalLM.from_pretrained(str(folder), dtype=dtype, attn_implementation="eager").eval()
        return cls(model, AutoTokenizer.from_pretrained(str(folder)))

    def token_logprobs(self, ids: Sequence[int], prompt: int) -> Tensor:
        """[tokens after the prompt]: log-prob of each token, of the last ``len(ids) - prompt``."""
        return self.distributions(ids, prompt).gather(-1, torch.tensor(ids[prompt:])[:, None])[:, 0]

    def distributions(self, ids: Sequence[int], prompt: int) -> Tensor:
        """[tokens after the prompt, vocabulary]: log-probs of what could stand in place of each token."""
        return log_softmax(self.model(torch.tensor([list(ids)])).logits[0, prompt - 1 : -1], -1)

    @torch.no_grad()
    def logprobs(self, ids: Sequence[int], prompt: int) -> Tensor:
        return self.token_logprobs(ids, prompt)

    def ids(self, prompt: Sequence[Mapping[str, str]], answer: str) -> tuple[list[int], int]:
        """The tokens of a conversation up to the end token of its answer, and those before the answer."""
        pieces = chatml(prompt, answer)
        prefix = self.tokenizer("".join(t for t, _ in pieces[:-1]), add_special_tokens=False)["input_ids"]
        return self.tokenizer("".join(t for t, _ in pieces), add_special_tokens=False)["input_ids"], len(prefix)

    def answer(self, prompt: Sequence[Mapping[str, str]], answer: str) -> Tensor:
        """Log-probs of the answer's tokens with its end token."""
        return self.logprobs(*self.ids(prompt, answer))


def scores(head: Tensor, body: Any, ids: Sequence[int]) -> Tensor:
    """[tokens]: the head's output after each token."""
    return body(torch.tensor([list(ids)])).last_hidden_state[0] @ head
