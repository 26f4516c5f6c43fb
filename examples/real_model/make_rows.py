"""Make the rows of this example: facts to write as JSON. They depend on this file only."""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]
TRAINING, HELD_OUT = 600, 100
VALUES = {
    "names": "Maria Tom Aisha Peter Lena Omar Julia Victor Nina Carlos Emma Ivan Sofia Hugo Clara David",
    "cities": "Lisbon Oslo Cairo Lima Rome Delhi Quito Athens Vienna Nairobi Dublin Seoul Prague Havana Berlin Tunis",
    "jobs": "baker nurse teacher farmer pilot painter lawyer cook dentist plumber gardener writer tailor judge",
    "foods": "bread olives honey cheese apples rice coffee salmon onions butter walnuts lemons pasta plums",
    "animals": "cat dog parrot rabbit horse turtle hamster goat",
    "colours": "red blue green black white brown yellow grey",
    "instruments": "piano violin flute guitar cello harp trumpet drum",
}
KINDS: dict[str, tuple[str, Row]] = {
    "person": ("{name} is {age} years old and lives in {city}.", {"name": "names", "age": (18, 90), "city": "cities"}),
    "worker": ("{name} works as a {job} in {city}.", {"name": "names", "job": "jobs", "city": "cities"}),
    "product": (
        "The shop sells {product} for {price} dollars and has {stock} left.",
        {"product": "foods", "price": (2, 60), "stock": (3, 400)},
    ),
    "trip": (
        "The train from {start} to {end} takes {hours} hours.",
        {"start": "cities", "end": "cities", "hours": (2, 30)},
    ),
}
"""A sentence, and for each key of its JSON object the VALUES or the range of numbers that its value is drawn from."""
NEW_KINDS: dict[str, tuple[str, Row]] = {
    "pet": ("{owner} has a {colour} {animal}.", {"owner": "names", "animal": "animals", "colour": "colours"}),
    "lesson": (
        "{student} pays {price} dollars for a {instrument} lesson with {teacher}.",
        {"student": "names", "teacher": "names", "instrument": "instruments", "price": (10, 95)},
    ),
}
"""Sentences and keys that training never shows."""


def fact(kinds: Mapping[str, tuple[str, Row]], draw: random.Random) -> Row:
    kind = draw.choice(list(kinds))
    sentence, keys = kinds[kind]
    answer = {
        key: draw.choice(VALUES[of].split()) if isinstance(of, str) else draw.randint(*of) for key, of in keys.items()
    }
    names = [f'"{key}" ({"text" if isinstance(value, str) else "number"})' for key, value in answer.items()]
    schema = f"{', '.join(names[:-1])} and {names[-1]}"
    text = (
        f"{sentence.format(**answer)}\n\nWrite this as a JSON object with the keys {schema}. Answer with the JSON only."
    )
    return {"prompt": text, "kind": kind, "answer": answer}


def distinct(count: int, make: Callable[[], Row]) -> list[Row]:
    """Rows with different prompts, so that no held-out row is trained on."""
    rows: dict[str, Row] = {}
    while len(rows) < count:
        row = make()
        rows[row["prompt"]] = row
    return list(rows.values())


def facts() -> dict[str, list[Row]]:
    draw = random.Random(0)
    rows = distinct(HELD_OUT + TRAINING, lambda: fact(KINDS, draw))
    new = distinct(HELD_OUT, lambda: fact(NEW_KINDS, draw))
    return {"held_out": rows[:HELD_OUT], "train": rows[HELD_OUT:], "new_kinds": new}


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("output", type=Path, help="folder for json/")
    folder = parser.parse_args(words).output / "json"
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in facts().items():
        path = folder / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        print(f"{path}: {len(rows)} rows")


if __name__ == "__main__":
    main()
