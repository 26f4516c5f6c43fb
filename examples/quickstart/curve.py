"""Draw a run's learning curve as SVG: ``python examples/quickstart/curve.py RUN PICTURE.svg TITLE``.

Reads ``metrics.jsonl`` and ``manifest.json`` of the run.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
from pathlib import Path
from typing import Any

WIDTH, HEIGHT = 720, 336
LEFT, RIGHT, TOP, BOTTOM = 56, 28, 40, 102
FONT = 'font-family="sans-serif" font-size="12"'
COLOURS = ("#d9541e", "#2e8b57")
SMOOTH = 3
"""Steps of the running mean."""


def draw(lines: list[dict[str, Any]], start: dict[str, Any], title: str) -> str:
    """The mean reward of each step, its running mean, and the accuracy on each source of held-out questions.

    Args:
        lines: of ``metrics.jsonl``.
        start: the entry of the run's start in ``manifest.json``.
    """
    last = lines[-1]["step"]

    def position(step: float, value: float) -> str:
        x = LEFT + (WIDTH - LEFT - RIGHT) * step / last
        return f"{x:.1f},{TOP + (HEIGHT - TOP - BOTTOM) * (1 - value):.1f}"

    reward = [(line["step"], line["reward/mean"]) for line in lines if "reward/mean" in line]
    smooth = [
        (s, statistics.fmean(v for _, v in reward[max(0, i - SMOOTH + 1) : i + 1])) for i, (s, _) in enumerate(reward)
    ]
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" {FONT}>',
        f"<title>{title}</title>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="22" font-size="14">{title}</text>',
    ]
    for value in (0.0, 0.25, 0.5, 0.75, 1.0):
        (x, y), (end, _) = position(0, value).split(","), position(last, value).split(",")
        parts.append(f'<line x1="{x}" y1="{y}" x2="{end}" y2="{y}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{float(y) + 4:.1f}" text-anchor="end" fill="#555">{value:g}</text>')
    for step in range(0, last + 1, max(1, last // 10)):
        x, y = position(step, 0).split(",")
        label = f"step {step}" if step == last else step
        parts.append(f'<text x="{x}" y="{float(y) + 18:.1f}" text-anchor="middle" fill="#555">{label}</text>')
    parts += [
        line_of(reward, position, "#b9cdea", 1),
        line_of(smooth, position, "#1f5fbf", 2),
        key(0, 0, "#1f5fbf", f"reward of the samples (mean of {SMOOTH} steps)"),
    ]
    for place, (name, colour) in enumerate(zip(sources(lines), COLOURS, strict=False)):
        points = [(line["step"], line[f"{name}/pass@1"]) for line in lines if f"{name}/pass@1" in line]
        count, label = lines[-1][f"{name}/prompts"], name.rpartition("/")[2].replace("_", " ")
        text = f"{label}, {count:.0f} questions: {points[0][1]:.2f} to {points[-1][1]:.2f}"
        dots = (position(*point).split(",") for point in points)
        parts += [
            line_of(points, position, colour, 2),
            *(f'<circle cx="{x}" cy="{y}" r="4" fill="{colour}"/>' for x, y in dots),
            key(340, 20 * place, colour, text),
        ]
    for place, text in enumerate(machine(start)):
        parts.append(f'<text x="{LEFT}" y="{HEIGHT - 24 + 16 * place}" fill="#555" font-size="11">{text}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def sources(lines: list[dict[str, Any]]) -> list[str]:
    """What stands before `/pass@1`: a name for each source of held-out questions, or one for all of them."""
    names = [match[1] for match in (re.fullmatch(r"(eval/.+)/pass@1", name) for name in lines[-1]) if match]
    return names or ["eval"]


def line_of(points: list[tuple[int, float]], position: Any, colour: str, width: int) -> str:
    line = " ".join(position(*p) for p in points)
    return f'<polyline fill="none" stroke="{colour}" stroke-width="{width}" points="{line}"/>'


def key(x: int, y: int, colour: str, text: str) -> str:
    y += HEIGHT - 64
    bar = f'<rect x="{LEFT + x}" y="{y - 9}" width="18" height="4" fill="{colour}"/>'
    return f'{bar}<text x="{LEFT + x + 24}" y="{y - 3}">{text}</text>'


def machine(start: dict[str, Any]) -> tuple[str, str]:
    """Hardware of the run; versions and date."""
    e = start["environment"]
    versions = ", ".join(f"{name} {e['packages'][name]}" for name in ("torch", "transformers"))
    gpu = "" if e.get("gpus") else " without a GPU"
    return f"{e['cores']} cores of an {e['cpu']}{gpu}", f"Python {e['python']}, {versions}; {start['time'][:10]}"


def write(run: Path, picture: Path, title: str) -> None:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    start = json.loads((run / "manifest.json").read_text())["starts"][0]
    picture.write_text(draw(lines, start, title), encoding="utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
