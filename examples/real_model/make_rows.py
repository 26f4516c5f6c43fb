"""Make the rows of this example: facts to write as JSON, problems for a calculator, short questions of GSM8K.

Facts and problems depend on this file only, questions on the files of GSM8K.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # one example uses parts of another

from examples.gsm8k.prepare import cleaned, read

Row = dict[str, Any]
TRAINING, HELD_OUT, DEMONSTRATIONS = 600, 100, 80
LONGEST_QUESTION = 200
"""Characters: short questions have short answers, so that a step takes seconds."""

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

EXAMPLE: tuple[str, Row] = ("A bottle of milk costs 3 dollars.", {"drink": "milk", "price": 3})
"""Shown in the prompts of a control."""

PROBLEMS = {
    "multiply": (
        "A box holds {a} eggs. How many eggs are in {b} boxes?",
        "A ticket costs {a} dollars. How much do {b} tickets cost?",
        "A hall has {a} rows of {b} seats. How many seats does it have?",
        "A printer prints {a} pages a minute. How many pages does it print in {b} minutes?",
    ),
    "add": (
        "Tom has {a} stamps and gets {b} more. How many stamps does he have now?",
        "A school has {a} girls and {b} boys. How many children does it have?",
        "Lena walked {a} metres and then {b} metres. How far did she walk?",
        "A farm sold {a} apples on Monday and {b} on Tuesday. How many apples did it sell?",
    ),
    "subtract": (
        "A tank holds {a} litres, and {b} are used. How many litres are left?",
        "Omar had {a} dollars and spent {b}. How many dollars does he have left?",
        "Of {a} letters, {b} are delivered. How many letters remain?",
        "A book has {a} pages. Nina has read {b}. How many pages must she still read?",
    ),
}
NEW_PROBLEMS = {
    "multiply": (
        "A worker earns {a} dollars a day. How much does she earn in {b} days?",
        "Each of {a} trees bears {b} pears. How many pears are there?",
        "A bus makes {a} trips a week. How many trips does it make in {b} weeks?",
        "A bag weighs {a} kilograms. How much do {b} such bags weigh?",
    ),
    "add": (
        "A library buys {b} books. It had {a} before. How many books does it have now?",
        "In a race {a} people run and {b} people walk. How many people take part?",
        "A cook needs {a} grams of flour and {b} grams of sugar. How many grams is that together?",
        "Hugo scored {a} points in May and {b} in June. How many points did he score?",
    ),
    "subtract": (
        "A train has {a} passengers, and {b} get off. How many passengers stay on it?",
        "A rope is {a} metres long. Then {b} metres are cut off. How long is the rest?",
        "A shop has {a} lamps and sells {b}. How many lamps are still in the shop?",
        "There were {a} guests. Now {b} have gone home. How many guests are still there?",
    ),
}
"""Wordings that training never shows."""


def fact(kinds: Mapping[str, tuple[str, Row]], draw: random.Random) -> Row:
    kind = draw.choice(list(kinds))
    sentence, keys = kinds[kind]
    answer = {
        key: draw.choice(VALUES[source].split()) if isinstance(source, str) else draw.randint(*source)
        for key, source in keys.items()
    }
    return {"prompt": request(sentence.format(**answer), answer), "kind": kind, "answer": answer}


def request(sentence: str, answer: Row) -> str:
    names = [f'"{key}" ({"text" if isinstance(value, str) else "number"})' for key, value in answer.items()]
    schema = f"{', '.join(names[:-1])} and {names[-1]}"
    return f"{sentence}\n\nWrite this as a JSON object with the keys {schema}. Answer with the JSON only."


def with_example(row: Row) -> Row:
    """The same request after a conversation in which the example is answered."""
    turns = (request(*EXAMPLE), json.dumps(EXAMPLE[1]), row["prompt"])
    roles = ("user", "assistant", "user")
    return {**row, "prompt": [{"role": role, "content": text} for role, text in zip(roles, turns, strict=True)]}


def problem(templates: Mapping[str, Sequence[str]], number: int, draw: random.Random) -> Row:
    """The operations take turns, so that a batch whose size is a multiple of three has as many rows of each."""
    operation = list(templates)[number % len(templates)]
    a, b = draw.randint(12, 99), draw.randint(12, 99)
    if operation != "multiply":
        b = draw.randint(101, 499)
        a = b + draw.randint(101, 499)
    answer = {"add": a + b, "subtract": a - b, "multiply": a * b}[operation]
    text = draw.choice(templates[operation]).format(a=a, b=b)
    return {"prompt": text, "answer": str(answer), "a": a, "operation": operation, "b": b}


def demonstration(row: Row) -> Row:
    """A problem's conversation with a call of the calculator."""
    arguments = {key: row[key] for key in ("a", "operation", "b")}
    call = {"type": "function", "function": {"name": "calculate", "arguments": arguments}}
    return {
        "messages": [
            {"role": "user", "content": row["prompt"]},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": row["answer"]},
            {"role": "assistant", "content": f"The answer is {row['answer']}."},
        ]
    }


def distinct(count: int, make: Callable[[int], Row]) -> list[Row]:
    """Rows with different prompts, so that no held-out row is trained on; ``make`` gets the number of the row."""
    rows: dict[str, Row] = {}
    while len(rows) < count:
        row = make(len(rows))
        rows[row["prompt"]] = row
    return list(rows.values())


def facts() -> dict[str, list[Row]]:
    draw = random.Random(0)
    rows = distinct(HELD_OUT + TRAINING, lambda _: fact(KINDS, draw))
    new = distinct(HELD_OUT, lambda _: fact(NEW_KINDS, draw))
    held_out = rows[:HELD_OUT]
    return {
        "held_out": held_out,
        "train": rows[HELD_OUT:],
        "new_kinds": new,
        "held_out_example": [with_example(row) for row in held_out],
        "new_kinds_example": [with_example(row) for row in new],
    }


def problems() -> dict[str, list[Row]]:
    draw = random.Random(0)
    rows = distinct(HELD_OUT + TRAINING + DEMONSTRATIONS, lambda number: problem(PROBLEMS, number, draw))
    return {
        "held_out": rows[:HELD_OUT],
        "train": rows[HELD_OUT : HELD_OUT + TRAINING],
        "demonstrations": [demonstration(row) for row in rows[HELD_OUT + TRAINING :]],
        "new_problems": distinct(HELD_OUT, lambda number: problem(NEW_PROBLEMS, number, draw)),
    }


def questions(data: str) -> dict[str, list[Row]]:
    rows = {name: cleaned(read(data, split)) for name, split in (("train", "train"), ("held_out", "test"))}
    return {
        name: [
            {"prompt": row["question"], "answer": row["answer"]}
            for row in group
            if len(row["question"]) <= LONGEST_QUESTION
        ]
        for name, group in rows.items()
    }


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("output", type=Path, help="folder for json/, tool/ and gsm8k/")
    parser.add_argument("--data", metavar="DIR|hub", help="GSM8K: a folder with its two files, or `hub`; else left out")
    arguments = parser.parse_args(words)
    tasks = {"json": facts(), "tool": problems()}
    if arguments.data:
        tasks["gsm8k"] = questions(arguments.data)
    for task, files in tasks.items():
        (arguments.output / task).mkdir(parents=True, exist_ok=True)
        for name, rows in files.items():
            path = arguments.output / task / f"{name}.jsonl"
            path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
            print(f"{path}: {len(rows)} rows")


if __name__ == "__main__":
    main()
