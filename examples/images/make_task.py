"""Make the task and an untrained image-text model: name the colour of one of two shapes in a drawn image.

The demonstrations are flawed on purpose: half of them name a random colour. A model that imitates them answers wrongly
nearly as often. Reinforcement learning, with a reward that only compares the answer, then reinforces the right ones.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

from PIL import Image, ImageDraw
from rlhf_testing.image_models import tiny_image_model

COLOURS = {
    "red": (220, 40, 40),
    "green": (40, 160, 60),
    "blue": (50, 80, 220),
    "orange": (250, 150, 30),
    "pink": (240, 140, 200),
    "grey": (130, 130, 130),
}
PLACES = ("left", "right")
CELL = 24
"""Height of an image in pixels, and half of its width."""
FLAWED = 1 / 2
"""Share of the demonstrations that name a random colour."""
TRAIN, HELD_OUT = 1500, 300
SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "initializer_range": 0.02}


def draw(file: Path, rng: random.Random) -> list[str]:
    """Draw a shape into each half of an image. Returns their colours."""
    image = Image.new("RGB", (len(PLACES) * CELL, CELL), (245, 245, 245))
    pen, colours = ImageDraw.Draw(image), rng.sample(sorted(COLOURS), len(PLACES))
    for half, colour in enumerate(colours):
        size = rng.randint(10, 18)
        x, y = half * CELL + rng.randint(1, CELL - size - 1), rng.randint(1, CELL - size - 1)
        rng.choice([pen.rectangle, pen.ellipse])((x, y, x + size, y + size), fill=COLOURS[colour])
    image.save(file)
    return colours


def questions(folder: Path, numbers: range, rng: random.Random) -> list[dict[str, str]]:
    """One question for each number, about an image of its own."""
    result = []
    for number in numbers:
        place = rng.choice(PLACES)
        colour = draw(folder / f"{number}.png", rng)[PLACES.index(place)]
        result.append({"prompt": f"{place}?", "images": f"images/{number}.png", "answer": colour})
    return result


def demonstration(question: dict[str, str], rng: random.Random) -> dict[str, str]:
    colour = rng.choice(sorted(COLOURS)) if rng.random() < FLAWED else question["answer"]
    return {"prompt": question["prompt"], "images": question["images"], "response": colour}


def write(path: Path, rows: list[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def make(output: Path) -> None:
    rng = random.Random(0)
    (output / "images").mkdir(parents=True)
    training = questions(output / "images", range(TRAIN), rng)
    write(output / "problems.jsonl", training)
    write(output / "held_out.jsonl", questions(output / "images", range(TRAIN, TRAIN + HELD_OUT), rng))
    write(output / "demonstrations.jsonl", [demonstration(row, rng) for _ in range(8) for row in training])
    tiny_image_model(output / "model", **SIZES)


if __name__ == "__main__":
    make(Path("runs/images/task"))
