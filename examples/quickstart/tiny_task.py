"""Make the tiny quick start's task and model: two-digit addition. Most of the demonstrations forget to carry.

The demonstrations are flawed on purpose. A model that imitates them usually adds wrongly if a carry is needed.
Reinforcement learning, with a reward that only checks results, then reinforces the few right answers.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

from rlhf_testing.tiny import tiny_model

FORGETS = 0.6
"""Share of the demonstrations that omit every carry."""
HELD_OUT = 400


def without_carry(a: int, b: int) -> int:
    """The sum without carries: 47 + 38 = 75, 82 + 51 = 33."""
    return 10 * ((a // 10 + b // 10) % 10) + (a + b) % 10


def write(path: Path, rows: list[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("output", type=Path)
    output = parser.parse_args().output
    output.mkdir(parents=True, exist_ok=True)
    draw = random.Random(0)
    pairs = [(a, b) for a in range(100) for b in range(100)]
    draw.shuffle(pairs)
    held_out, training = pairs[:HELD_OUT], pairs[HELD_OUT:]

    def demonstration(a: int, b: int) -> dict[str, str]:
        result = without_carry(a, b) if draw.random() < FORGETS else a + b
        return {"prompt": f"{a}+{b}=", "response": str(result)}

    def problem(a: int, b: int) -> dict[str, str]:
        return {"prompt": f"{a}+{b}=", "answer": str(a + b)}

    write(output / "demonstrations.jsonl", [demonstration(a, b) for _ in range(10) for a, b in training])
    write(output / "problems.jsonl", [problem(a, b) for a, b in training])
    write(output / "held_out.jsonl", [problem(a, b) for a, b in held_out])
    tiny_model(
        output / "model", hidden=128, layers=4, heads=4, kv_heads=4, intermediate=256, std=0.02, chars="0123456789+="
    )


if __name__ == "__main__":
    main()
