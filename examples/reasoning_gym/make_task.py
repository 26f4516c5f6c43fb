"""Make the task and the model: spell a word backward. Most of the demonstrations repeat the word as it is.

The questions are those of reasoning-gym's `spell_backward`, chosen by seed. No held-out word is in the training data.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

from rlhf_plugin_reasoning_gym.__main__ import rows
from rlhf_testing.tiny import tiny_model

FORWARD = 0.7
"""Share of the demonstrations that give the word as it is."""
HELD_OUT, QUESTIONS = 200, 3000
LENGTHS = {"min_word_len": 3, "max_word_len": 5}


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def word(row: dict[str, Any]) -> str:
    """The word that a question asks to spell backward."""
    return row["prompt"].rpartition(": ")[2].lower()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("output", type=Path)
    output = parser.parse_args().output
    output.mkdir(parents=True, exist_ok=True)
    draw = random.Random(0)
    questions = list(rows("spell_backward", LENGTHS, range(HELD_OUT + QUESTIONS)))
    held_out, training = questions[:HELD_OUT], questions[HELD_OUT:]
    unseen = {word(row) for row in held_out}
    training = [row for row in training if word(row) not in unseen]

    def demonstration(row: dict[str, Any]) -> dict[str, Any]:
        answer = word(row) if draw.random() < FORWARD else word(row)[::-1]
        return {"prompt": row["prompt"], "response": answer}

    write(output / "demonstrations.jsonl", [demonstration(row) for row in training])
    write(output / "questions.jsonl", training)
    write(output / "held_out.jsonl", held_out)
    tiny_model(
        output / "model", hidden=128, layers=3, heads=4, kv_heads=4, intermediate=256, std=0.02, chat_template="default"
    )
    print(f"{len(training)} training questions, {HELD_OUT} held out")


if __name__ == "__main__":
    main()
