"""Make the task and the untrained model of this example: sums of three-digit numbers. Most of the demonstrations guess,
and forget to carry. The others ask the calculator."""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

from rlhf_testing.tiny import tiny_model, tiny_tokenizer
from transformers import AutoTokenizer

CALLS = 0.2
"""Share of the demonstrations that call the tool."""
PIECES = ["tools: add\n", '<tool_call>{"name": "add", "arguments": {"a": ', ', "b": ', "}}</tool_call>"]
"""Texts that are one token each, as frequent texts are with the tokenizers of real models. All else is characters."""
HELD_OUT, TRAINING, DEMONSTRATIONS = 200, 2000, 20_000


def without_carry(a: int, b: int) -> int:
    return sum(10**n * ((a // 10**n + b // 10**n) % 10) for n in range(3))


def guess(a: int, b: int) -> list[dict[str, Any]]:
    return [{"role": "assistant", "content": str(without_carry(a, b))}]


def call_tool(a: int, b: int) -> list[dict[str, Any]]:
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": a, "b": b}}}
    return [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": str(a + b)},
        {"role": "assistant", "content": str(a + b)},
    ]


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def make(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    draw = random.Random(0)
    numbers = draw.sample(range(900 * 900), HELD_OUT + TRAINING + DEMONSTRATIONS)
    pairs = [(100 + n // 900, 100 + n % 900) for n in numbers]
    problems = [{"prompt": f"{a}+{b}", "answer": str(a + b)} for a, b in pairs[: HELD_OUT + TRAINING]]
    write(folder / "held_out.jsonl", problems[:HELD_OUT])
    write(folder / "problems.jsonl", problems[HELD_OUT:])
    questions = [({"role": "user", "content": f"{a}+{b}"}, a, b) for a, b in pairs[HELD_OUT + TRAINING :]]
    write(
        folder / "demonstrations.jsonl",
        [{"messages": [q, *(call_tool if draw.random() < CALLS else guess)(a, b)]} for q, a, b in questions],
    )
    path = tiny_tokenizer(folder / "model", chat_template=Path(__file__).with_name("template.jinja").read_text())
    tokenizer = AutoTokenizer.from_pretrained(path)
    tokenizer.add_tokens(PIECES)
    tokenizer.save_pretrained(path)
    tiny_model(path, hidden=128, layers=4, heads=4, kv_heads=4, intermediate=256, std=0.02)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path)
    make(parser.parse_args().output)
