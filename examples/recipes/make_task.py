"""Make the recipes' task and model: sort four digits. Most of the demonstrations leave the digits unsorted.

A model that imitates the demonstrations gives both answers, the unsorted one more often. Each recipe trains it to give
the sorted one, with a reward that compares digits.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

from rlhf_testing.tiny import tiny_model

LAZY = 0.6
"""Share of the demonstrations that repeat the digits unsorted."""
HELD_OUT = 200


def write(path: Path, rows: list[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def make(output: Path) -> None:
    output.mkdir(parents=True, exist_ok=True)
    draw = random.Random(0)
    texts = [f"{n:04d}" for n in range(10_000)]
    draw.shuffle(texts)
    held_out, training = texts[:HELD_OUT], texts[HELD_OUT:]

    def demonstration(digits: str) -> dict[str, str]:
        answer = digits if draw.random() < LAZY else "".join(sorted(digits))
        return {"prompt": f"{digits}>", "response": answer}

    def problem(digits: str) -> dict[str, str]:
        return {"prompt": f"{digits}>", "answer": "".join(sorted(digits))}

    write(output / "demonstrations.jsonl", [demonstration(t) for t in training])
    write(output / "problems.jsonl", [problem(t) for t in training])
    write(output / "held_out.jsonl", [problem(t) for t in held_out])
    chars = "0123456789> <rm_score:-."  # digits, and the characters that conditional_sft writes into prompts
    tiny_model(output / "model", hidden=64, layers=2, heads=4, kv_heads=4, intermediate=128, std=0.02, chars=chars)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("output", type=Path)
    make(parser.parse_args().output)
