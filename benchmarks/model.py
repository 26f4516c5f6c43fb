"""Make the files that all arms share: the model and tokenizer, a copy that ends answers, a copy that scores, prompts,
rows, pairs, and the batches of the correctness gate. Runs in our environment; both environments read the folder."""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Literal

import torch
from rlhf_testing.tiny import tiny_model
from settings import (
    ANSWERS,
    DEVICE,
    LONG_PROMPT,
    LONGEST,
    MAX_NEW_TOKENS,
    PROMPTS,
    ROWS,
    SAMPLES,
    SHORTEST,
    SIZES,
    VOCABULARY,
)
from transformers import AutoModelForCausalLM, AutoTokenizer

CHARS = "0123456789+-*/=()<> abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.,:;?!'\n"
MEAN_LENGTH = 22
"""Mean tokens of an answer without a limit; with the limit of 64 tokens the mean is about 20."""


def make_model(path: Path, head: Literal["lm", "scalar"] = "lm") -> None:
    """Qwen3 with random weights: by default 4.45 M parameters and a vocabulary of characters.

    Additional tokens are numbers after a space. No text is encoded with them, but each can be sampled and decodes to
    text, so that rewards differ.
    """
    words = (f" {n}" for n in range(VOCABULARY - 3 - len(CHARS)))
    tiny_model(path, std=0.02, chars=[*CHARS, *words], seed=0, head=head, **SIZES)


def make_ending_model(source: Path, path: Path) -> None:
    """The same model with an end token whose probability is about 1/22 at every position.

    All embeddings get a common component along one direction, so that every hidden state has it. The end token gets
    more of it; bisection finds how much. With tied embeddings this acts as a bias on the end token's logit.
    """
    tokenizer = AutoTokenizer.from_pretrained(str(source))
    model = AutoModelForCausalLM.from_pretrained(str(source), dtype=torch.float32).to(DEVICE)
    generator = torch.Generator().manual_seed(1)
    weight = model.get_input_embeddings().weight.data
    direction = torch.randn(weight.shape[1], generator=generator).to(DEVICE)
    direction /= direction.norm()
    weight += 0.5 * direction
    plain_end = weight[tokenizer.eos_token_id].clone()
    ids = torch.randint(3, weight.shape[0], (16, MAX_NEW_TOKENS), generator=generator).to(DEVICE)
    low, high = 0.0, 2.0
    for _ in range(20):
        middle = (low + high) / 2
        weight[tokenizer.eos_token_id] = plain_end + middle * direction
        with torch.no_grad():
            ends = model(ids).logits.softmax(-1)[:, 4:, tokenizer.eos_token_id].mean()
        low, high = (middle, high) if ends < 1 / MEAN_LENGTH else (low, middle)
    model.save_pretrained(str(path))
    tokenizer.save_pretrained(str(path))


def make_data(work: Path) -> None:
    """``prompts.jsonl`` (sums) and ``rows-N.jsonl``: N x 16 demonstrations of 20 to 200 tokens, evenly spread."""
    draw = random.Random(0)
    sums = [f"{draw.randrange(10, 100)}+{draw.randrange(10, 100)}=" for _ in range(1024)]
    (work / "prompts.jsonl").write_text("".join(json.dumps({"prompt": p}) + "\n" for p in sums))
    for scale in (1, 2, 4):
        with (work / f"rows-{scale}.jsonl").open("w") as file:
            for number in range(ROWS * scale):
                tokens = SHORTEST + (LONGEST - SHORTEST) * (number % ROWS) // (ROWS - 1)
                answer = "".join(draw.choice(CHARS[:-1]) for _ in range(tokens - 7))  # prompt 6, end token 1
                file.write(json.dumps({"prompt": draw.choice(sums), "completion": answer}) + "\n")


def make_pairs(work: Path) -> None:
    """``pairs.jsonl``: 16 pairs; each side has 20 to 200 tokens, prompt included, evenly spread.
    ``pairs-prompts.jsonl``: 16 pairs with long prompts and shorter answers."""
    draw = random.Random(3)

    def text(tokens: int) -> str:
        return "".join(draw.choice(CHARS[:-1]) for _ in range(tokens))

    def spread(number: int, low: int, high: int) -> int:
        return low + (high - low) * (number % ROWS) // (ROWS - 1)

    with (work / "pairs.jsonl").open("w") as file:
        for number in range(ROWS):
            sides = [spread(number * step, SHORTEST, LONGEST) - 7 for step in (1, 7)]  # prompt 6, end token 1
            file.write(json.dumps(_pair(text(6), text(sides[0]), text(sides[1]))) + "\n")
    with (work / "pairs-prompts.jsonl").open("w") as file:
        for number in range(ROWS):
            sides = [spread(number * step, *ANSWERS) - 1 for step in (1, 7)]
            file.write(json.dumps(_pair(text(LONG_PROMPT), text(sides[0]), text(sides[1]))) + "\n")


def _pair(prompt: str, chosen: str, rejected: str) -> dict[str, str]:
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected}


def make_gate(work: Path) -> None:
    """``gate.json``: one GRPO batch (answers of several lengths, rewards) and one SFT batch, as token ids."""
    draw = random.Random(2)

    def ids(count: int) -> list[int]:
        return [draw.randrange(3, 3 + len(CHARS)) for _ in range(count)]

    groups = []
    for _ in range(PROMPTS // 4):
        answers = [ids(draw.randrange(1, MAX_NEW_TOKENS + 1)) for _ in range(SAMPLES)]
        prompt = ids(draw.randrange(4, 12))
        groups.append({"prompt": prompt, "answers": answers, "rewards": [draw.random() for _ in answers]})
    rows = [{"prompt": ids(draw.randrange(3, 9)), "answer": ids(draw.randrange(15, 190))} for _ in range(ROWS)]
    (work / "gate.json").write_text(json.dumps({"grpo": groups, "sft": rows}))


def make(work: Path, pairs: bool = True) -> None:
    """All files. Without ``pairs`` those that preferences.py needs are left out."""
    work.mkdir(parents=True, exist_ok=True)
    make_model(work / "model")
    make_ending_model(work / "model", work / "ending")
    make_data(work)
    make_gate(work)
    if pairs:
        make_model(work / "scalar", "scalar")
        make_pairs(work)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("work", type=Path)
    parser.add_argument("--without-pairs", action="store_true", help="leave out the pairs and the model that scores")
    arguments = parser.parse_args()
    make(arguments.work, not arguments.without_pairs)


if __name__ == "__main__":
    main()
