"""Curves of braille characters: 2 x 4 dots in each character, one colour for each curve."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from rich.text import Text

WIDTH, HEIGHT = 60, 5
"""Width of a picture in characters."""
STYLES = ("cyan", "magenta")
_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
"""The bit of each dot of a braille character, by column and by row from the top."""
_EMPTY = 0x2800


@dataclass(frozen=True, slots=True)
class Curve:
    """One metric of one run."""

    name: str
    points: Sequence[tuple[int, float]]
    """(step, value), in the order of the steps; values that are not finite leave a gap."""

    @property
    def finite(self) -> list[tuple[int, float]]:
        return [(step, value) for step, value in self.points if math.isfinite(value)]

    @property
    def varies(self) -> bool:
        """Whether the curve has different values."""
        return len({value for _, value in self.finite}) > 1


def draw(curves: Sequence[Curve], colour: bool, width: int = WIDTH, height: int = HEIGHT) -> Text:
    """At most two curves with their axes. With ``colour`` both are in one picture; otherwise in two pictures, one below
    the other, with the same axes. Empty if no curve has a finite value."""
    has_legend, curves = len(curves) > 1, [curve for curve in curves if curve.finite]
    points = [point for curve in curves for point in curve.finite]
    if not points:
        return Text()
    steps, values = [step for step, _ in points], [value for _, value in points]
    axes = (min(steps), max(steps), min(values), max(values))
    cells = [_cells(curve.finite, axes, width, height) for curve in curves]
    if colour or not has_legend:
        return _picture(cells, axes, width, height, colour)
    pictures = [
        Text.assemble(f"{curve.name}\n", _picture([cell], axes, width, height, False))
        for curve, cell in zip(curves, cells, strict=True)
    ]
    return Text("\n").join(pictures)


def number(value: float) -> str:
    """Four digits, and whole numbers such as counts in full."""
    if not math.isfinite(value):
        return str(value)
    return f"{value:.0f}" if value == round(value) and abs(value) < 1e9 else f"{value:.4g}"


Axes = tuple[int, int, float, float]
"""First and last step, lowest and highest value."""


def _cells(points: Sequence[tuple[int, float]], axes: Axes, width: int, height: int) -> list[list[int]]:
    """The dots of a curve, as bits of ``height`` rows of ``width`` characters. A column of dots shows the mean of the
    values of its steps; columns with values are joined by straight lines."""
    first, last, low, high = axes
    columns: defaultdict[int, list[float]] = defaultdict(list)
    for step, value in points:
        columns[round((step - first) / (last - first or 1) * (2 * width - 1))].append(value)
    cells = [[0] * width for _ in range(height)]
    rows = {
        column: (high - math.fsum(column_values) / len(column_values)) / (high - low) * (4 * height - 1)
        if high > low
        else 2 * height
        for column, column_values in sorted(columns.items())
    }
    ends = list(rows.items())
    # The first point is also joined with itself, so that a single point is drawn.
    for (left, start), (right, end) in pairwise([*ends[:1], *ends]):
        previous = round(start)
        for column in range(left, right + 1):
            row = round(start + (end - start) * (column - left) / (right - left or 1))
            # Dots between the rows of two columns, without the dot of the column before.
            for dot in range(row, previous) if row < previous else range(min(previous + 1, row), row + 1):
                cells[dot // 4][column // 2] |= _DOTS[column % 2][dot % 4]
            previous = row
    return cells


def _picture(cells: Sequence[list[list[int]]], axes: Axes, width: int, height: int, colour: bool) -> Text:
    first, last, low, high = axes
    labels = ["" for _ in range(height)]
    labels[0], labels[-1] = number(high), number(low) if high > low else ""
    margin = max(map(len, labels))
    picture = Text()
    for row in range(height):
        picture.append(f"{labels[row].rjust(margin)} \N{BOX DRAWINGS LIGHT VERTICAL}", "dim" if colour else "")
        for column in range(width):
            bits = [curve[row][column] for curve in cells]
            curves = [n for n, bit in enumerate(bits) if bit]
            style = "" if not colour or not curves else STYLES[curves[0]] if len(curves) == 1 else "bold white"
            character = chr(_EMPTY | bits[0] | (bits[1] if len(bits) > 1 else 0))
            picture.append(character if curves else " ", style)
        picture.append("\n")
    steps = f"step {first}".ljust(width - len(str(last))) + str(last) if last > first else f"step {first}"
    return picture.append(" " * (margin + 2) + steps, "dim" if colour else "")
