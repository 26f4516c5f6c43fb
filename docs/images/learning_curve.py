"""Draw the learning curve of a quick start as SVG: ``python docs/images/learning_curve.py runs/quickstart/rloo``.

Reads ``metrics.jsonl`` and ``manifest.json`` of the run and writes ``learning-curve.svg`` beside this file.
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any

OUTPUT = Path(__file__).parent / "learning-curve.svg"
WIDTH, HEIGHT = 720, 300
LEFT, RIGHT, TOP, BOTTOM = 56, 28, 40, 66
FONT = 'font-family="sans-serif" font-size="12"'
SMOOTH = 10
"""Steps of the running mean."""


def draw(lines: list[dict[str, Any]], start: dict[str, Any]) -> str:
    """The mean reward of each step, its running mean, and the held-out accuracy.

    Args:
        lines: of ``metrics.jsonl``.
        start: the entry of the run's start in ``manifest.json``.
    """
    last = lines[-1]["step"]

    def at(step: float, value: float) -> str:
        x = LEFT + (WIDTH - LEFT - RIGHT) * step / last
        return f"{x:.1f},{TOP + (HEIGHT - TOP - BOTTOM) * (1 - value):.1f}"

    reward = [(line["step"], line["reward/mean"]) for line in lines if "reward/mean" in line]
    smooth = [
        (s, statistics.fmean(v for _, v in reward[max(0, i - SMOOTH + 1) : i + 1])) for i, (s, _) in enumerate(reward)
    ]
    held_out = [(line["step"], line["eval/pass@1"]) for line in lines if "eval/pass@1" in line]
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" {FONT}>',
        "<title>Learning curve of the quick start</title>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="22" font-size="14">Two-digit addition: RLOO with a reward that checks results</text>',
    ]
    for value in (0.0, 0.25, 0.5, 0.75, 1.0):
        (x, y), (end, _) = at(0, value).split(","), at(last, value).split(",")
        parts.append(f'<line x1="{x}" y1="{y}" x2="{end}" y2="{y}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{float(y) + 4:.1f}" text-anchor="end" fill="#555">{value:g}</text>')
    for step in range(0, last + 1, 50):
        x, y = at(step, 0).split(",")
        label = f"step {step}" if step == last else step
        parts.append(f'<text x="{x}" y="{float(y) + 18:.1f}" text-anchor="middle" fill="#555">{label}</text>')
    parts += [
        line_of(reward, at, "#b9cdea", 1),
        line_of(smooth, at, "#1f5fbf", 2),
        line_of(held_out, at, "#d9541e", 2),
        *(f'<circle cx="{p[0]}" cy="{p[1]}" r="4" fill="#d9541e"/>' for p in (at(*v).split(",") for v in held_out)),
        key(0, "#1f5fbf", f"reward of the samples (mean of {SMOOTH} steps)"),
        key(
            340,
            "#d9541e",
            f"accuracy on {lines[-1]['eval/prompts']:.0f} held-out sums: {held_out[0][1]:.2f} to {held_out[-1][1]:.2f}",
        ),
        f'<text x="{LEFT}" y="{HEIGHT - 8}" fill="#555" font-size="11">{machine(start)}</text>',
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def line_of(points: list[tuple[int, float]], at: Any, colour: str, width: int) -> str:
    return (
        f'<polyline fill="none" stroke="{colour}" stroke-width="{width}" points="{" ".join(at(*p) for p in points)}"/>'
    )


def key(x: int, colour: str, text: str) -> str:
    y = HEIGHT - 28
    bar = f'<rect x="{LEFT + x}" y="{y - 9}" width="18" height="4" fill="{colour}"/>'
    return f'{bar}<text x="{LEFT + x + 24}" y="{y - 3}">{text}</text>'


def machine(start: dict[str, Any]) -> str:
    """Hardware, versions and date of the run."""
    e = start["environment"]
    versions = ", ".join(f"{name} {e['packages'][name]}" for name in ("torch", "transformers"))
    return f"{e['cores']} cores of an {e['cpu']} without a GPU, Python {e['python']}, {versions}; {start['time'][:10]}"


def main() -> None:
    run = Path(sys.argv[1])
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    OUTPUT.write_text(draw(lines, json.loads((run / "manifest.json").read_text())["starts"][0]), encoding="utf-8")


if __name__ == "__main__":
    main()
