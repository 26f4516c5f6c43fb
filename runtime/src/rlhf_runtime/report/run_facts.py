"""The facts about a run that the page shows: state, curves, left-out samples, options, plugins."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Any

from rlhf_runtime.observe.progress import PHASES, shown_metrics
from rlhf_runtime.output.metrics import as_number
from rlhf_runtime.report.run_record import RunRecord, few, value_text

POINTS = 2000
"""Largest number of points of a curve. If there are more steps, a point is the mean of several steps."""
SLICES = 20_000
"""Largest number of slices of a timeline; the longest are shown."""
TIMED = ("step", *(phase for phase in PHASES if phase not in ("save", "export")))
"""The whole step, and its phases."""
OF_A_CALL = ("run.output", "run.resume", "run.overwrite")
"""Options for a single call of `rlhf train`. They are not shown."""
LEFT_OUT = {
    "stream/filtered": "groups did not pass stream.filter",
    "stream/short": "groups were missing from their batch after all refills",
    "stream/failed_samples": "samples failed in their rollout or their rewards",
    "stream/failed_groups": "groups were dropped, because samples failed or too few samples had a reward",
    "stream/unscored": "samples had no reward: every reward returned None",
    "stream/stale": "groups were older than stream.staleness allows, and drawn again",
    "stream/tokens_filtered": "tokens of groups that did not pass stream.filter",
    "stream/tokens_failed": "tokens of failed samples and their groups",
    "stream/tokens_unscored": "tokens of samples without a reward",
    "stream/tokens_stale": "tokens of groups that were too old",
    "stream/tokens_restarted_weights": "tokens of answers that began again with new weights",
    "stream/tokens_restarted_engine": "tokens of answers on engines that died",
    "stream/tokens_restarted_resume": "tokens of answers that a resume sampled again",
    "pairs/left_out": "pairs had no token to learn from",
    "pairs/tied_groups": "groups had equal rewards, so no pair was made of them",
    "pairs/equal_answers": "pairs had two equal texts",
    "labels/left_out": "rows had no token to learn from",
    "rejection/empty_groups": "groups had no sample that was kept",
    "empty": "steps had nothing to learn from and made no update",
}
"""{metric: meaning of its sum over the steps}."""
LEFT_OUT_SO_FAR = {
    "data/dropped": "rows were longer than data.max_tokens (data.too_long), counted again in each pass",
    "data/bad_rows": "rows were malformed (data.bad_rows), counted again in each pass",
}
"""{metric that is a count since the first step: its meaning}."""


def run_facts(record: RunRecord) -> dict[str, Any]:
    """The facts as JSON values. ``problems`` names everything that cannot be read."""
    points = points_of(metric_lines(record), len(record.lines))
    state, reason = record.state
    facts = {
        "path": str(record.path),
        "name": str(record.option("run.name") or record.path.resolve().name),
        "state": state,
        "why": reason,
        "algorithm": record.algorithm,
        "model": record.model,
        "data": record.data,
        "started": few([time.isoformat(" ", "minutes") for time in record.started]),
        "changed": record.time.isoformat(" ", "minutes"),
        "steps": points[-1].step if points else 0,
        "total_steps": record.total_steps,
        "best": None if record.best is None else [record.best.metric, record.best.value, record.best.step],
        "curves": curves(points),
        "headline": shown_metrics({name: None for point in points for name in point.means}),
        "phases": phase_times(points),
        "left_out": left_out(points),
        "notes": [str(note) for note in _list(record.end.get("notes"))],
        "options": record.options,
        "options_changed": _options_changed(record),
        "plugins": [plugin_row(plugin) for plugin in record.plugins],
        "environment": _environment(record.start.get("environment")),
        "timeline": _timeline(record),
    }
    return {**facts, "problems": record.problems}


def metric_lines(record: RunRecord) -> Iterator[Mapping[str, Any]]:
    """The readable lines of ``metrics.jsonl``, with increasing steps."""
    last: int | None = None
    wrong = 0
    for line in (record.line(number) for number in range(len(record.lines))):
        step = line.get("step")
        if type(step) is int and (last is None or step > last):
            last = step
            yield line
        else:
            wrong += 1
    if wrong:
        record.problems.append(
            f"metrics.jsonl: {wrong} lines do not have a later step than the line before, and are left out."
        )


@dataclass(frozen=True, slots=True)
class Point:
    """One point of the curves: consecutive steps."""

    step: int
    """The last of its steps."""
    steps: int
    """Their number."""
    means: dict[str, float | None]
    """{metric: the mean of its finite numbers; None if it has none}."""
    not_finite: dict[str, int]
    """{metric: number of values that no curve can show}."""
    phases: dict[str, float | None]
    """{one of :data:`TIMED`: mean seconds of the steps with times; None if no step has times}. A step without a phase
    counts as 0 seconds of it."""
    left_out: dict[str, float]
    """{metric of what was left out of training: its count in these steps, or since the first step
    (:data:`LEFT_OUT_SO_FAR`)}."""

    @classmethod
    def of(cls, lines: Sequence[Mapping[str, Any]]) -> Point:
        point = cls(lines[-1]["step"], len(lines), {}, {}, {}, {})
        for name in {name: None for line in lines for name in line if name != "step"}:
            values = [value for line in lines if (value := as_number(line.get(name))) is not None]
            numbers = [value for value in values if math.isfinite(value)]
            point.means[name] = _short(fmean(numbers)) if numbers else None
            if len(numbers) < len(values):
                point.not_finite[name] = len(values) - len(numbers)
            if numbers and _meaning(name):
                point.left_out[name] = numbers[-1] if name in LEFT_OUT_SO_FAR else sum(numbers)
        timed = [line for line in lines if line["step"] > 0 and _finite(line.get("time/step")) is not None]
        for phase in TIMED:
            seconds = [_finite(line.get(f"time/{phase}")) or 0.0 for line in timed]
            point.phases[phase] = _short(fmean(seconds)) if seconds else None
        return point


def points_of(lines: Iterable[Mapping[str, Any]], count: int) -> list[Point]:
    """The points of ``count`` lines. The lines are not kept: those of a long run take gigabytes of memory."""
    size, rest = math.ceil(count / POINTS) or 1, iter(lines)
    return [Point.of(part) for part in iter(lambda: list(islice(rest, size)), [])]


def curves(points: Sequence[Point]) -> dict[str, Any]:
    """``steps``; ``metrics``: {name: a number or None for each point}; ``every``: number of steps that are averaged in
    a point; ``not_finite``: {name: number of values that no curve can show}."""
    not_finite: defaultdict[str, int] = defaultdict(int)
    for point in points:
        for name, count in point.not_finite.items():
            not_finite[name] += count
    metrics = {name: [p.means.get(name) for p in points] for name in {n: None for p in points for n in p.means}}
    return {
        "steps": [point.step for point in points],
        "metrics": {name: m for name, m in metrics.items() if name in not_finite or any(v is not None for v in m)},
        "every": max((point.steps for point in points), default=1),
        "not_finite": not_finite,
    }


def phase_times(points: Sequence[Point]) -> dict[str, list[float | None]]:
    """:attr:`Point.phases` of all points."""
    return {phase: [point.phases[phase] for point in points] for phase in TIMED}


def _finite(value: Any) -> float | None:
    number = as_number(value)
    return number if number is not None and math.isfinite(number) else None


def left_out(points: Sequence[Point]) -> list[list[Any]]:
    """[metric, count, meaning] of everything that was left out of training."""
    sums: defaultdict[str, float] = defaultdict(float)
    for point in points:
        for name, number in point.left_out.items():
            sums[name] = number if name in LEFT_OUT_SO_FAR else sums[name] + number
    return [[name, count, _meaning(name)] for name, count in sums.items() if count]


def _meaning(name: str) -> str:
    """The meaning of the count of a metric, also of a metric of one member of an algorithm
    (``MEMBER/pairs/tied_groups``); empty if the metric does not count what was left out."""
    if name in LEFT_OUT_SO_FAR:
        return LEFT_OUT_SO_FAR[name]
    if name.endswith("/skipped"):
        return "optimizer steps were skipped: a loss or gradient was not finite; their batches are in skipped/"
    start, _, rest = name.partition("/")
    return LEFT_OUT.get(name) or (LEFT_OUT.get(rest, "") if start != "eval" else "")


def _options_changed(record: RunRecord) -> dict[str, str] | None:
    paths = record.options_changed
    if paths is None:
        return None
    values = {path: record.option(path) for path in paths if path not in OF_A_CALL}
    return {path: value_text(value) for path, value in values.items() if value is not None}


def plugin_row(plugin: Mapping[str, Any]) -> list[str]:
    """[kind, name, distribution with version or the reference of a file] of a recorded plugin."""
    source = plugin.get("ref") or f"{plugin.get('distribution', '?')} {plugin.get('version') or ''}".strip()
    return [str(plugin.get("kind", "?")), str(plugin.get("name", "?")), str(source)]


def _environment(environment: Any) -> dict[str, str]:
    facts: dict[str, str] = {}
    for name, value in environment.items() if isinstance(environment, Mapping) else ():
        for key, item in value.items() if isinstance(value, Mapping) else ((name, value),):
            if item not in (None, [], ""):
                facts[str(key)] = ", ".join(map(str, item)) if isinstance(item, list) else str(item)
    return facts


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _short(value: float) -> float:
    """The value with six digits. More cannot be seen in a curve."""
    return float(f"{value:.6g}")


def _timeline(record: RunRecord) -> dict[str, Any] | None:
    """``tracks``: [group, track] names; ``slices``: [track, begin, duration (both in microseconds), name, arguments];
    ``total``: number of slices before the limit. None if the run has no timeline."""
    path = record.path / "timeline.json"
    if not path.is_file():
        return None
    groups: dict[Any, str] = {}
    names: dict[tuple[int, int], str] = {}
    slices: list[tuple[tuple[int, int], int, int, str, str]] = []
    wrong = 0
    for event in _events(path):
        try:
            track = (int(event["pid"]), int(event["tid"]))
            if event["ph"] == "M" and event["name"] == "process_name":
                groups[track[0]] = str(event["args"]["name"])
            elif event["ph"] == "M" and event["name"] == "thread_name":
                names[track] = str(event["args"]["name"])
            elif event["ph"] in ("X", "i"):
                arguments = ", ".join(f"{key} {value}" for key, value in event.get("args", {}).items())
                slices.append((track, int(event["ts"]), int(event.get("dur", 0)), str(event["name"]), arguments))
        except (KeyError, ValueError, TypeError, AttributeError):
            wrong += 1
    if wrong:
        record.problems.append(f"timeline.json: {wrong} lines are not events of a timeline, and are left out.")
    if not slices:
        return None
    longest = sorted(sorted(slices, key=lambda s: -s[2])[:SLICES], key=lambda s: s[1])
    tracks = sorted({slice[0] for slice in longest})
    numbers = {track: number for number, track in enumerate(tracks)}
    begin = longest[0][1]
    return {
        "tracks": [[groups.get(track[0], "?"), names.get(track, "")] for track in tracks],
        "slices": [[numbers[track], start - begin, length, name, text] for track, start, length, name, text in longest],
        "total": len(slices),
    }


def _events(path: Path) -> Iterator[Any]:
    """The event in each line; None for a line that is not JSON, except the last line, which may be incomplete."""
    damaged = False
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            if damaged:
                yield None
            # A damaged line is reported when another line follows it. The last one may be incomplete: the run was
            # killed.
            text, damaged = line.strip().rstrip(","), False
            if text not in ("", "[", "]"):
                try:
                    yield json.loads(text)
                except ValueError:
                    damaged = True
