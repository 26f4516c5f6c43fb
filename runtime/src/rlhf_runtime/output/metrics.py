"""``metrics.jsonl``: one JSON object per step, written to disk before the step counts as done. A resume drops the lines
after its checkpoint."""

from __future__ import annotations

import os
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from rlhf.errors import CheckpointError

from rlhf_runtime.checkpoint.atomic_files import replace_file, sync_file
from rlhf_runtime.checkpoint.json_values import dumps, loads

TIME = "time/"
"""Keys with this prefix hold wall times in seconds."""
MEASURED = (TIME, "throughput/", "memory/")
"""Prefixes of keys whose values differ between two runs with the same seed. All other values of a line are
reproducible."""


def step_seconds(metrics: Mapping[str, float], default: float = 0.0) -> float:
    """The time of a step without its evaluation, from its line. ``default``: used if the line has no times."""
    return metrics.get(f"{TIME}step", default) - metrics.get(f"{TIME}evaluate", 0.0)


class MetricsLog:
    """Appends ``{"step": 12, "reward/mean": 0.5, ...}``. NaN and infinity are kept as ``{"$float": "nan"}``."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self._last: int | None = None

    def append(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the line of ``step`` and force it to the disk. Raises CheckpointError if ``step`` is not larger than
        the last step."""
        if self._last is None:
            if _ends_inside_a_line(self.path):
                raise CheckpointError(f"{self.path} ends in the middle of a line; cut() it back to a checkpoint first.")
            self._last = max(recorded_steps(self.path), default=-1)
        if step <= self._last:
            raise CheckpointError(f"{self.path} already holds step {self._last}; step {step} cannot be added after it.")
        if "step" in metrics:
            raise CheckpointError(f"a metric is named 'step', which is the step's own key (at step {step}); rename it.")
        text = dumps({"step": step, **metrics}, f"metrics of step {step}", nonfinite="mark") + "\n"
        created = not self.path.exists()
        with self.path.open("a", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        # The new name is in the folder, which has to reach the disk too.
        if created:
            sync_file(self.path.parent)
        self._last = step

    def missing(self, step: int) -> str:
        """The steps in 1 .. ``step`` that have no line, as text for a message; empty if every step has a line."""
        steps = {*recorded_steps(self.path)}
        absent = [n for n in range(1, step + 1) if n not in steps]
        return "" if not absent else f"{len(absent)} of the steps 1 to {step}, the first of them step {absent[0]}"

    def cut(self, step: int) -> int:
        """Keep the lines up to ``step``. Drop later lines and an incomplete last line. Returns the number of dropped
        lines."""
        if not self.path.exists():
            return 0
        steps = recorded_steps(self.path)
        count = bisect_right(steps, step)
        with self.path.open("rb") as old:
            replace_file(self.path, lambda file: file.writelines(islice(old, count)))
        self._last = steps[count - 1] if count else -1
        return len(steps) - count


def read_metrics(path: Path | str) -> list[dict[str, Any]]:
    """All lines of a ``metrics.jsonl``, in order. An incomplete last line (of a killed or running process) is left out.
    Raises CheckpointError if an earlier line is damaged. The error names the line."""
    return list(_lines(Path(path)))


@dataclass(frozen=True, slots=True)
class Series:
    """The numbers of one metric, in the order of the steps."""

    steps: array[int] = field(default_factory=lambda: array("q"))
    values: array[float] = field(default_factory=lambda: array("d"))


def read_series(path: Path | str, last: int | None = None) -> dict[str, Series]:
    """{metric: its numbers} of the lines that :func:`read_metrics` returns, with the same errors. A number takes 16
    bytes. The lines are not kept: those of a long run take gigabytes of memory.

    Args:
        last: the step after which lines are left out; None: none is.
    """
    series: dict[str, Series] = {}
    for line in _lines(Path(path)):
        step = line.pop("step")
        if last is not None and step > last:
            break
        for name, value in line.items():
            metric = series.get(name)
            if metric is None:
                metric = series[name] = Series()
            if (number := as_number(value)) is not None:
                metric.steps.append(step)
                metric.values.append(number)
    return series


def as_number(value: Any) -> float | None:
    """``value`` as a float; None if it is not a number or too large for a float."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError:
        return None


def recorded_steps(path: Path | str) -> list[int]:
    """The steps of the lines that :func:`read_metrics` returns, with the same errors. The lines are not kept: those
    of a long run take gigabytes of memory."""
    return [line["step"] for line in _lines(Path(path))]


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    if not path.exists():
        return
    last: int | None = None
    with path.open("rb") as file:
        for number, raw in enumerate(file, 1):
            if not raw.endswith(b"\n"):
                return
            text = raw[:-1].decode("utf-8", errors="replace")
            line = loads(text, f"{path}:{number}", "Restore the file, or delete that line")
            if not isinstance(line, dict) or type(line.get("step")) is not int:
                raise CheckpointError(
                    f"{path}:{number} is not a step's metrics. Restore the file, or delete that line."
                )
            if last is not None and line["step"] <= last:
                raise CheckpointError(
                    f"{path}:{number} is of step {line['step']}, but follows step {last}. Restore the file, or delete "
                    "that line."
                )
            last = line["step"]
            yield line


def _ends_inside_a_line(path: Path) -> bool:
    if not path.exists():
        return False
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - 1))
        return file.read(1) not in (b"\n", b"")
