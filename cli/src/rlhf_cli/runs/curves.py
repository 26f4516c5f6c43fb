"""The metrics of a run over its steps, and their curves of braille characters: 2 x 4 dots in each character."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median

from rich.text import Text
from rlhf.errors import CheckpointError, ConfigError, did_you_mean
from rlhf_runtime.observe.progress import HEADLINE, shown_metrics
from rlhf_runtime.output.metrics import Series, read_series

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


@dataclass(frozen=True, slots=True)
class Extremes:
    """First and last value of a metric, and its smallest and largest value with their steps."""

    first: float
    last: float
    lowest: tuple[float, int] | None
    """None if no value is finite."""
    highest: tuple[float, int] | None


@dataclass(frozen=True)
class History:
    """The numbers of ``metrics.jsonl``, or why they cannot be read."""

    names: Mapping[str, Series]
    """The metrics of all steps, in the order of their first appearance."""
    problem: str = ""

    @classmethod
    def read(cls, run: Path) -> History:
        try:
            return cls(read_series(run / "metrics.jsonl"))
        except (CheckpointError, OSError) as error:
            return cls({}, str(error))

    def headline(self, labels: Collection[str] = HEADLINE) -> list[str]:
        """The metrics of this run that are shown in a run's progress.

        Args:
            labels: labels of the metrics in the progress.
        """
        return shown_metrics(self.names, labels)

    def check(self, names: Sequence[str], run: Path) -> None:
        """Raises ConfigError for a metric that the run does not have."""
        for name in names:
            if name not in self.names:
                hint = f"it has {', '.join(sorted(self.names))}" if self.names else "it has recorded no step yet"
                raise ConfigError(f"--metric {name}: {run} has no such metric; {hint}.{did_you_mean(name, self.names)}")

    def curve(self, name: str, label: str = "") -> Curve:
        series = self.names.get(name, Series())
        return Curve(label or name, list(zip(series.steps, series.values, strict=True)))

    def extremes(self, name: str) -> Extremes | None:
        """None if no step has the metric."""
        points = self.curve(name).points
        finite = [(value, step) for step, value in points if math.isfinite(value)]
        if not points:
            return None
        low, high = (min(finite), max(finite, key=lambda p: (p[0], -p[1]))) if finite else (None, None)
        return Extremes(points[0][1], points[-1][1], low, high)

    def seconds_a_step(self) -> float | None:
        """The median time of a step without its evaluation, as in a run's last line; None if no step has a time."""
        evaluating = dict(self.curve("time/evaluate").finite)
        times = [seconds - evaluating.get(step, 0.0) for step, seconds in self.curve("time/step").finite if step]
        return median(times) if times else None
