"""Make the task and the model of the example: write a function of one line. Most demonstrations forget parentheses.

The demonstrations are flawed on purpose: `plus 3 times 4` needs `(x+3)*4`, and most of them write `x+3*4`. A model that
imitates them does the same. Tests in a sandbox then reward the few right programs.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

from rlhf_testing.tiny import tiny_model

FORGETS = 0.8
"""Share of the demonstrations without parentheses where they are needed."""
HELD_OUT = 100
INPUTS = (0, 1, 5, -3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("output", type=Path)
    output = parser.parse_args().output
    output.mkdir(parents=True, exist_ok=True)
    draw = random.Random(0)
    tasks = [(form, a, b) for form in ("plus", "times") for a in range(2, 30) for b in range(2, 30)]
    draw.shuffle(tasks)

    def prompt(form: str, a: int, b: int) -> str:
        return f"{form} {a} {'times' if form == 'plus' else 'plus'} {b}:"

    def demonstration(form: str, a: int, b: int) -> dict[str, str]:
        formula = f"x*{a}+{b}"
        if form == "plus":
            formula = f"x+{a}*{b}" if draw.random() < FORGETS else f"(x+{a})*{b}"
        return {"prompt": prompt(form, a, b), "response": f"def f(x): return {formula}"}

    def problem(form: str, a: int, b: int) -> dict[str, object]:
        values = [(x + a) * b if form == "plus" else x * a + b for x in INPUTS]
        tests = [{"function": "f", "args": [x], "expected": y} for x, y in zip(INPUTS, values, strict=True)]
        return {"prompt": prompt(form, a, b), "tests": tests}

    def write(name: str, rows: list[dict[str, str]] | list[dict[str, object]]) -> None:
        (output / name).write_text("".join(json.dumps(row) + "\n" for row in rows))

    write("demonstrations.jsonl", [demonstration(*task) for _ in range(10) for task in tasks[HELD_OUT:]])
    write("problems.jsonl", [problem(*task) for task in tasks[HELD_OUT:]])
    write("held_out.jsonl", [problem(*task) for task in tasks[:HELD_OUT]])
    chars = "".join(sorted(set("def f(x): return plus times minus*+0123456789")))
    tiny_model(output / "model", hidden=128, layers=4, heads=4, kv_heads=4, intermediate=256, std=0.02, chars=chars)


if __name__ == "__main__":
    main()
