"""Make the task and the untrained model of this example. A customer asks for the price of an item. The catalogue has
it, or names the item that has replaced it, up to twice. The demonstrations often guess a price in place of looking."""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

from rlhf_testing.tiny import tiny_model, tiny_tokenizer
from transformers import AutoTokenizer

LOOKS = 0.5
"""Probability with which a demonstration looks up the next item. Otherwise it guesses a price."""
PIECES = ["tools: look_up\n", '<tool_call>{"name": "look_up", "arguments": {"item": "', '"}}</tool_call>']
"""Texts that are one token each, as frequent texts are with the tokenizers of real models. All else is characters."""
HELD_OUT, TRAINING, DEMONSTRATIONS = 64, 1000, 20_000


def task(draw: random.Random) -> dict[str, Any]:
    """A question with its catalogue: a chain of one to three items, and the price of the last."""
    items = [draw.choice("bcdfghjk") + str(draw.randrange(10)) for _ in range(3)]
    chain = list(dict.fromkeys(items))[: draw.randint(1, 3)]
    price = str(draw.randrange(10, 100))
    return {"prompt": chain[0], "price": price, "catalogue": dict(zip(chain, [*chain[1:], price], strict=True))}


def demonstration(draw: random.Random) -> dict[str, Any]:
    question = task(draw)
    messages, item = [{"role": "user", "content": question["prompt"]}], question["prompt"]
    while item in question["catalogue"] and draw.random() < LOOKS:
        call = {"type": "function", "function": {"name": "look_up", "arguments": {"item": item}}}
        item = question["catalogue"][item]
        messages += [
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": item},
        ]
    price = str(draw.randrange(10, 100)) if item in question["catalogue"] else item
    return {"messages": [*messages, {"role": "assistant", "content": price}]}


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def make(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    draw = random.Random(0)
    write(folder / "held_out.jsonl", [task(draw) for _ in range(HELD_OUT)])
    write(folder / "tasks.jsonl", [task(draw) for _ in range(TRAINING)])
    write(folder / "demonstrations.jsonl", [demonstration(draw) for _ in range(DEMONSTRATIONS)])
    path = tiny_tokenizer(folder / "model", chat_template=Path(__file__).with_name("template.jinja").read_text())
    tokenizer = AutoTokenizer.from_pretrained(path)
    tokenizer.add_tokens(PIECES)
    tokenizer.save_pretrained(path)
    tiny_model(path, hidden=128, layers=4, heads=4, kv_heads=4, intermediate=256, std=0.02)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path)
    make(parser.parse_args().output)
