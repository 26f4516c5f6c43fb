"""The metrics of a run over its steps."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from rlhf.errors import CheckpointError, ConfigError, did_you_mean
from rlhf_runtime.observe.progress import HEADLINE, shown_metrics
from rlhf_runtime.output.metrics import Series, read_series

from rlhf_cli.runs.curves import Curve


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
