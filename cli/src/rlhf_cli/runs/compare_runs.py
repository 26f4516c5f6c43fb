"""The output of `rlhf show RUN OTHER`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.text import Text
from rlhf_runtime.observe.sample_lines import printable
from rlhf_runtime.report.run_record import RunRecord

from rlhf_cli.runs.curves import STYLES, draw, number
from rlhf_cli.runs.metric_history import History
from rlhf_cli.runs.one_run import CURVES
from rlhf_cli.runs.output import has_colour, table

NOT_COMPARED = ("run.name", "run.output", "run.resume")
"""Options for the folder and the name of a run, which are not compared."""
ABSENT = "-"

Two = tuple[RunRecord, RunRecord]


def print_comparison(
    console: Console, records: Two, histories: tuple[History, History], metrics: Sequence[str]
) -> None:
    """Print two runs side by side.

    Args:
        metrics: metrics to show; if empty, those that a run shows in its progress.
    """
    names = [str(record.path) for record in records]
    grid = table("", *names)
    for label, field in (("algorithm", "algorithm"), ("model", "model")):
        grid.add_row(label, *(str(getattr(record, field)) for record in records))
    grid.add_row("state", *(record.state[0] for record in records))
    grid.add_row("steps", *(f"{record.steps_done} of {record.total_steps or '?'}" for record in records))
    bests = [record.best for record in records]
    if any(bests):
        grid.add_row("best", *(f"{b.metric} {number(b.value)} (step {b.step})" if b else "" for b in bests))
    console.print(grid)
    _print_differences(console, "Options that differ", names, _differences(*map(_options, records)))
    _print_differences(console, "Plugins that differ", names, _differences(*(_plugins(record) for record in records)))
    _print_metrics(console, names, histories, metrics)
    for record, history in zip(records, histories, strict=True):
        for problem in dict.fromkeys(filter(None, [*record.problems, history.problem])):
            console.print(f"note: {record.path}: {problem}", style="yellow", soft_wrap=True)


def _options(record: RunRecord) -> dict[str, str]:
    return {path: text for path, text in record.options.items() if path not in NOT_COMPARED}


def _plugins(record: RunRecord) -> dict[str, str]:
    """{kind and name: distribution with version, or the reference of a file}."""
    return {
        f"{p.get('kind')} {p.get('name')}": f"{p.get('distribution')} {p.get('version') or p.get('sha256', '')[:12]}"
        for p in record.plugins
    }


def _differences(first: Mapping[str, str], other: Mapping[str, str]) -> list[tuple[str, str, str]]:
    keys = [*first, *(key for key in other if key not in first)]
    return [(key, first.get(key, ABSENT), other.get(key, ABSENT)) for key in keys if first.get(key) != other.get(key)]


def _print_differences(console: Console, title: str, names: Sequence[str], rows: Sequence[tuple[str, ...]]) -> None:
    console.print()
    if not rows:
        console.print(f"{title}: none", style="bold")
        return
    grid = table("", *names, title=title)
    for row in rows:
        grid.add_row(*row)
    console.print(grid)


def _print_metrics(
    console: Console, names: Sequence[str], histories: tuple[History, History], metrics: Sequence[str]
) -> None:
    rows = list(metrics) or list(dict.fromkeys(name for history in histories for name in history.headline()))
    if not rows:
        return
    console.print()
    grid = table("", *(f">{name}" for name in names), title="Metrics, first -> last")
    for name in rows:
        extremes = [history.extremes(name) for history in histories]
        grid.add_row(name, *(f"{number(f.first)} -> {number(f.last)}" if f else "" for f in extremes))
    console.print(grid)
    colour = has_colour(console)
    for name in metrics or dict.fromkeys(name for history in histories for name in history.headline(CURVES)):
        curves = [history.curve(name, run) for history, run in zip(histories, names, strict=True)]
        if not any(curve.varies for curve in curves):
            continue
        console.print()
        title = Text(printable(name), "bold")
        if colour:
            for run, style in zip(names, STYLES, strict=True):
                title.append("  ").append(run, style)
        console.print(title)
        console.print(draw(curves, colour))
